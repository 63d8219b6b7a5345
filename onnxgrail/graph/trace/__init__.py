"""Trace channels through a graph: labels, propagation through operators, blocks."""
