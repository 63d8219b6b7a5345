"""Layers whose weights can be fitted."""
