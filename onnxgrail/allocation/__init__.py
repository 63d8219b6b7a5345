"""Widths: a schedule over blocks, a budget, rounding, and what rounding cost.  Start with `choose.py`."""
