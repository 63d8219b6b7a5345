"""Calibration data: from files and iterables to feeds of a model."""
