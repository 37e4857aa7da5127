"""Keep a model deployed and answer requests."""
