"""Steps of a run that a killed run does not repeat, and how they are stored."""
