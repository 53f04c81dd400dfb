"""`python -m bench`, which is `weft bench`."""

from bench.command import bench

bench()
