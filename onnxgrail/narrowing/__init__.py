"""Decide how narrow every block becomes, measure, fit and record it."""
