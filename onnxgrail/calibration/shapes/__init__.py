"""Sizes and values for inputs whose dimensions the model leaves open."""
