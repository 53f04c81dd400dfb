"""Construction, layout, movement between layouts, operands of calls, and values of ShardTensors."""
