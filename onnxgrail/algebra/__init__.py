"""Numerical code: second moments, ridge regression, scores, reducers, compensation. NumPy and SciPy only, no ONNX."""
