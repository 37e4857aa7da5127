"""One served model: its life cycle, and what executes it."""
