"""Public bug reports as small programs, run on ShardTensors and on torch's DTensors."""
