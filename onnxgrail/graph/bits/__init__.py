"""Weights in a few bits: which a graph can store so, the bytes that they take, and their forms."""
