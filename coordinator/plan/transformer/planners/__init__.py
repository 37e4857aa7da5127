"""Searches for the shares of each device, by the name in `TransformerStrategy.search` or as a method of its own."""
