"""The resident kernel's host side: tape, memory, launch, rings. Must not know: requests, text."""
