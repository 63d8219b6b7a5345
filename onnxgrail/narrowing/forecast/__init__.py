"""Predicts the time, memory and disk space of a run before it starts."""
