"""Refines the narrowed model by gradient descent: fits its weights to the dense network."""
