"""Tools on runs and records; each is a command, see its docstring."""
