"""Weights of 8 bits: a subclass of a tensor, and what torch and other packages do with it."""
