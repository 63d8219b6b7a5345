"""Chooses widths: a schedule over blocks, a budget, and rounding. `choose.py` is the entry point."""
