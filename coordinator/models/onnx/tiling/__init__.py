"""Tiles: an ONNX graph rewritten so that one operator becomes several, which may run on different devices."""
