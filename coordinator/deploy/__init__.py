"""Bring a plan up: push chunks, start and connect workers."""
