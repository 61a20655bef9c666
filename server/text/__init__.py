"""Text side: tokens to text and back, chat templates, stop strings. Knows nothing of HTTP, queues or tensors."""
