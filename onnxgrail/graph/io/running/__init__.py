"""Change a model for the runtime only: types that it has no kernels for, and random numbers."""
