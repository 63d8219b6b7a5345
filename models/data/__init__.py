"""Files of the embedded models of onnxgrail: read them through `onnxgrail.models`."""
