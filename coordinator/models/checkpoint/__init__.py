"""Hugging Face checkpoints: families, tensors, sharding, sentence pooling."""
