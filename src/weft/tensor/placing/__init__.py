"""Tensors on their way: made, laid out, moved to other layouts, entering calls, read."""
