"""Planner processes: idle ones kept ready, and the policies that a planner begins with."""
