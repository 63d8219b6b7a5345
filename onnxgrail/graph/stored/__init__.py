"""Weights as the file stores them: integers with scales, packed, repeated, transposed."""
