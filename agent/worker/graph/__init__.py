"""Worker runtime for ONNX operator graphs (onnxruntime, no torch)."""
