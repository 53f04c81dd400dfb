"""Calls that draw: each as draws of weft's own (`weft.rng`) and ordinary ops."""
