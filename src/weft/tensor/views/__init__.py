"""Views whose data had to move: how they follow their base, and their base follows them."""
