"""What the model is fed and how it is run: data, synthetic inputs, ONNX Runtime sessions, streamed statistics."""
