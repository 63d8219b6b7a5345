"""Flatten a graph so that the tracer can follow channels: branches, functions, sequences, states."""
