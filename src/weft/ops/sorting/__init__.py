"""What needs elements in order: sorts, order statistics, distinct elements."""
