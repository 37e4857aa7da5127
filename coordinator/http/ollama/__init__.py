"""Ollama's API: version, tags, show, ps, pull, chat, generate and embeddings."""
