"""Read and write model files: load, map external data, serialize, save."""
