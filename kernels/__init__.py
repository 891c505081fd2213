"""Attention and output head: the backends that the model chooses from when a run starts."""
