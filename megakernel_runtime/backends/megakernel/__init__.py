"""The resident kernel as a runtime, with the graphs backend beside it for steps that are too large for it."""
