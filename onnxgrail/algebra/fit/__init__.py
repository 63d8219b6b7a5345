"""Fit the weights that are left."""
