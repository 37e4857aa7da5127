"""Refinements of a plan: plan in, better plan out."""
