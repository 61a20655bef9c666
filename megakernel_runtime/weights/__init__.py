"""Weights of a model: from foreign files, or from a seed, to torch tensors under our own names."""
