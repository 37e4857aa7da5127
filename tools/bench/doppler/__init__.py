"""Doppler (arXiv 2505.23131) measured: the paper's tables, the plan after a loss, the shipped policy, and real execution."""
