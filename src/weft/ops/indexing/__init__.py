"""Elements that move between ranks, to where indices or new positions send them."""
