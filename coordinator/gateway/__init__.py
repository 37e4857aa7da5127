"""The gateway: a process of its own that owns the port for clients, and what it exchanges with the coordinator."""
