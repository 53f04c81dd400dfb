"""What a call consists of: the ops that it runs on meta tensors, and facts about them."""
