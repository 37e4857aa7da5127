"""The task graphs of Doppler's evaluation: sharded operators with costs, homes, and executable ONNX."""
