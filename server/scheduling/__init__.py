"""Who runs next and which pages they get: pure policy. Time is passed in. Must not know: torch, clocks, sockets, text."""
