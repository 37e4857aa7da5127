"""Graphs of operators (ONNX): planned, deployed, served. Transformers have planners of their own (`coordinator.planners`)."""
