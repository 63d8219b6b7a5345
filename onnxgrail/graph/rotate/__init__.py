"""Residual streams of transformers: find them, and change their basis without changing the function of the model."""
