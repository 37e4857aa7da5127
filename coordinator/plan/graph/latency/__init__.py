"""Placement for the latency of one request (Moirai and baselines)."""
