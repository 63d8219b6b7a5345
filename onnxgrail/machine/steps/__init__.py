"""Steps of a run that are not repeated after a kill, and their storage."""
