"""The transport of the data plane: its interface, and its implementation over ZeroMQ."""
