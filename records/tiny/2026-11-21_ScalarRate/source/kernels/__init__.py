"""Backends that the model chooses from at run time, one idea a file, each held to a plain twin by the tests."""
