"""The meaning of programs, in torch on whole operations: the specification that every backend is compared with."""
