"""Worker runtime for transformers (torch)."""
