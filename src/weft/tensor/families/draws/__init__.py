"""Random calls: each consists of draws of weft's own (`weft.rng`) and of ordinary ops."""
