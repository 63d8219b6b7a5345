"""Rounding of weights to a few bits: scales by search, and errors that are carried on to later columns."""
