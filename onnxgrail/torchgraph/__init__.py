"""ONNX graphs run in torch, so that gradients of any named value can be computed.

It imports torch, an optional dependency, so other modules import it only inside functions.
"""
