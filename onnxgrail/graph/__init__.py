"""ONNX graphs: reading and writing, tracing channels, narrowing and rewriting. No algebra."""
