"""Plans for operator graphs."""
