"""Deploy a plan: push weight chunks, start and connect workers."""
