"""Model files: load, map, serialize, write."""
