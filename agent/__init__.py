"""The agent: the daemon that lends a device to its home, and the child processes that compute."""
