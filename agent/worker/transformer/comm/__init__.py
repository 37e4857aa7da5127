"""Collectives over the data plane, with tile overlap."""
