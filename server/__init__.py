"""Megakernel server: HTTP, text and scheduling. Knows nothing of tensors."""
