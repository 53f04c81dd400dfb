"""What `weft bench train` measures: models, the ways to shard them, bytes, memory, time."""
