"""The user's choices: their types and checks, recipe files, and what files of others may contain."""
