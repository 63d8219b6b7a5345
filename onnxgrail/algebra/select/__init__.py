"""Score channels and choose which ones stay."""
