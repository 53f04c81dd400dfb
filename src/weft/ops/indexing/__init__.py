"""Elements that move between ranks as indices, or new positions, direct."""
