"""Activations of the calibration batches as they pass through the network, and the statistics computed from them."""
