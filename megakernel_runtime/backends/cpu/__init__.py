"""The CPU backend: the reference program on whole operations of torch, made fast. Knows no GPU."""
