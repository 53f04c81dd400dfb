"""Views whose data had to move: they follow their base, and their base follows them."""
