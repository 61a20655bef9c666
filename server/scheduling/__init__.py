"""Who runs next and which pages they get: pure policy. Must not know: torch, clocks (time is passed in), sockets."""
