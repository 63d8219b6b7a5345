"""Gradient steps on top of the closed-form result: weights of the narrowed graph, fitted to the dense network."""
