"""Wire protocol: messages, tensor frames, activation codec, request/reply."""
