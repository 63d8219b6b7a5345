"""Sums over activations: second moments and what they say."""
