"""The ops of a call, found on meta tensors, and facts about them."""
