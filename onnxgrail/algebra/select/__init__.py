"""Scores units and selects those that stay."""
