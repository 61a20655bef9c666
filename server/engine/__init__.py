"""The engine process: frames, the loop around scheduler and runtime, supervision. Must not know: HTTP, text."""
