"""The HTTP gateway: a process of its own that answers OpenAI's and Ollama's APIs as a client of the coordinator.

It holds the key of one app, for `/health`. Every other request runs with the key that its bearer token stands for, so the
coordinator itself decides what a token may do. Of this project it imports `hearth` only.
"""
