"""How a call is carried out: looked up, decided once, run on local tensors."""
