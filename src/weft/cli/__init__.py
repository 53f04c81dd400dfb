"""The command line: `weft demo`, `weft run`, `weft bench`."""
