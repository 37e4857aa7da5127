"""Experiments with the HTTP gateway: hostile requests, its overhead, and the turns of a voice assistant."""
