"""The version, here and nowhere else: pyproject.toml reads this line without running it."""

__version__ = "0.1.0"
