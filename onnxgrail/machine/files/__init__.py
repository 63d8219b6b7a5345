"""Files: what is read must not change, what is written is whole or not there."""
