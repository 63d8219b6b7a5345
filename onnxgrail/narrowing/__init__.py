"""Decides the width of every block, measures activations, fits weights and records the decisions."""
