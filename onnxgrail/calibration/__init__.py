"""Calibration: data, synthetic inputs, ONNX Runtime sessions, and statistics of activations."""
