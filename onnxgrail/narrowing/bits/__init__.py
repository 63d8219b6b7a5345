"""Weights in a few bits: which matrices, the fit of their codes, and the graph that stores them."""
