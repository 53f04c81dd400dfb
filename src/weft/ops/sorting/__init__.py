"""Ops that need elements in order: sorts, order statistics, distinct elements."""
