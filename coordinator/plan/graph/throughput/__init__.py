"""Partitioning and placement for pipeline throughput."""
