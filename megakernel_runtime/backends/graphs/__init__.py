"""The graphs backend: a program run kernel by kernel on a CUDA GPU, its steps captured in CUDA graphs."""
