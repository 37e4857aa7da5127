"""Bytes on sockets: messages, tensor frames, activation codec, request/reply."""
