"""The emulated testbed, the benchmarks (`python -m tools.bench`) and the papers' experiments."""
