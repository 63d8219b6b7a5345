"""Export of torch modules to ONNX files.  The folder is not called `export`, which would hide that function."""
