"""What differs between kinds of model: transformers and ONNX graphs."""
