"""Planners, cost models and the simulator: they decide what runs on which device. Pure."""
