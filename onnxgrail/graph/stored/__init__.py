"""Stored forms of weights: quantized, packed, repeated, transposed."""
