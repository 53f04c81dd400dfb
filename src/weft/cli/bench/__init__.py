"""`weft bench`: what redistribution costs here, and what the network takes."""
