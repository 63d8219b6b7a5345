"""Solves the linear systems of fits and selections."""
