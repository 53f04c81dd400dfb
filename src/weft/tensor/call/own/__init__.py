"""Calls of what users have registered: on local tensors by their rules, or by their handlers."""
