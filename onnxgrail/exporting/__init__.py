"""Torch modules to ONNX files.  The room is not called `export`, which would hide the function of that name."""
