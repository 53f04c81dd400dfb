"""What weft costs: `weft bench`."""
