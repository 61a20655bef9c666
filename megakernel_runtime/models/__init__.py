"""Model families and their configurations: from foreign files to `ModelConfig`. No tensors, no devices."""
