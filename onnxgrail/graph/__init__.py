"""Graph rooms: everything that knows ONNX and no algebra."""
