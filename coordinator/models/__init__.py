"""Readers of model files: checkpoints and ONNX."""
