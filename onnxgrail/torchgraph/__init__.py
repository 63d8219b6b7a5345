"""ONNX graphs run in torch, so that gradients flow to any named value.

The one room that imports torch, an extra: others import this one inside functions, behind `available`.
"""
