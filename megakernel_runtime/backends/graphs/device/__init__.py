"""Plain Triton kernels of the graphs backend, and what starts them. Pointers and constants in, no decisions."""
