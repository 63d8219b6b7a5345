"""Fits the kept weights."""
