"""Which devices are there, and what was measured on them."""
