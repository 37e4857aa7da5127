"""A second coordinator that follows the first one, and which of the two leads."""
