"""Where activations lie and who adds up their second moments."""
