"""Sizes and values for inputs that the model leaves open."""
