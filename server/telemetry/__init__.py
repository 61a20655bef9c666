"""What the server tells about itself: metric families, structured logs. Must not know: HTTP routes, text, tensors."""
