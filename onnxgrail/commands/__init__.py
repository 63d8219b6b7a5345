"""The public calls, one file each."""
