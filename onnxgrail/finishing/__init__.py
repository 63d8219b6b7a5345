"""Finish a model: simplify, verify, quantize, check against a runtime."""
