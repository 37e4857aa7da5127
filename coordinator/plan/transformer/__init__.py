"""Plans for transformers."""
