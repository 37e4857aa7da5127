"""Searches for the shares of each device."""
