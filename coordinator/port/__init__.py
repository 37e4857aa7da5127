"""The client port: the process that owns it, and what that process exchanges with the coordinator."""
