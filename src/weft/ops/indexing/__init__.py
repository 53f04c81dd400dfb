"""Elements that come from, or go to, where indices or their new places say."""
