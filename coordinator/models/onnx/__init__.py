"""ONNX files as operator graphs: reading, shapes, FLOPs, cutting into segments."""
