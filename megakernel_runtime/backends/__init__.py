"""Runtimes: each runs plans on one kind of device. Must not know: requests, text, HTTP."""
