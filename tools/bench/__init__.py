"""Benchmarks on the emulated testbed: `python -m tools.bench galaxy ...` reruns the Galaxy paper's tables."""
