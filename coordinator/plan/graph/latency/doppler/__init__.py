"""Doppler for a home: a learned policy that places operators, and searches around its placements."""
