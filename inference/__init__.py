"""Use a trained model: load it, let it write, evaluate it, export it."""
