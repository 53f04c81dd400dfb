"""Calls of ops that users have registered: on local tensors by rules, or by handlers."""
