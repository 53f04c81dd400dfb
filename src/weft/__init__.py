"""One tensor on many devices."""
