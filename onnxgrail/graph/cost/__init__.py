"""Parameters and multiply-accumulates."""
