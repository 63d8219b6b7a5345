"""Layers whose weights a fit may change."""
