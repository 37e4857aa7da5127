"""The emulated testbed and the benchmarks: `python -m tools.testbed`, `python -m tools.bench`."""
