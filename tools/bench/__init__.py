"""Benchmarks on the emulated testbed: `python -m tools.bench galaxy ...` reproduces tables of the Galaxy paper."""
