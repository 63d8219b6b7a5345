"""Files: inputs must not change while they are read, outputs are written whole or not at all."""
