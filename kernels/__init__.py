"""Attention and output head: backends, one of which the trainer chooses at start."""
