"""Bring a graph into the flat form that the tracer follows: branches, functions, sequences, states."""
