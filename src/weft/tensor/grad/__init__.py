"""The borders of autograd: gradients, hooks, Functions, checkpoints, optimizers."""
