"""The user's choices: their types and checks, recipe files, and what a file that travels may say."""
