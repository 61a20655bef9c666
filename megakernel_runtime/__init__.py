"""Tensor side: programs, weights, backends. Knows nothing of HTTP, JSON, text or users."""
