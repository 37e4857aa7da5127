"""Clients: the port, whom it serves, and what an app learns."""
