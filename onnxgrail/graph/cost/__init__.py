"""Count parameters and multiply-accumulates."""
