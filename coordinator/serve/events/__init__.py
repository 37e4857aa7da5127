"""What a coordinator records for its users: events and metrics."""
