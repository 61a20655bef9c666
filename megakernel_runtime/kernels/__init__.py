"""Device code in Triton's Gluon dialect: pointers and constants in, no host decisions."""
