"""Calls whose results have lengths that depend on the data."""
