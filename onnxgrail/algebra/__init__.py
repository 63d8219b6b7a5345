"""The numbers: second moments, ridge solves, scores, reducers and compensations.  numpy and scipy only, no ONNX."""
