"""Placement of activations on the host or a GPU, and the sums of their second moments there."""
