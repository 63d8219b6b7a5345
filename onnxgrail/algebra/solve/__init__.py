"""Symmetric solves and products."""
