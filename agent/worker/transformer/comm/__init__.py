"""Collectives over the data plane, with overlap of communication and compute by tiles."""
