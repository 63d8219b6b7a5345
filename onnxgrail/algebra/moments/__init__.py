"""Second moments of activations, and quantities derived from them."""
