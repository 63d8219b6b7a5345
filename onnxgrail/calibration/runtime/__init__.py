"""Use of ONNX Runtime: sessions, threads, timing, trial runs, quantization tools."""
