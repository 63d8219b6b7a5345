"""Activations on their way through the network, and the statistics taken from them."""
