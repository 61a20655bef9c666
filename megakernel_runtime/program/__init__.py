"""What a decoder step is: instructions as data, built from a model's configuration, and their meaning on a CPU.

Must not know: devices, requests, text.
"""
