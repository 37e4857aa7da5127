"""Training of the policy for a home: one network for any graph and any devices, that the planner runs with numpy."""
