"""What a model is: checkpoints and ONNX files."""
