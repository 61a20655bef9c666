"""HTTP routes and what every response has in common. Must not know: tensors, the engine's frames."""
