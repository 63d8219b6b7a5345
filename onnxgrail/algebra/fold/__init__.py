"""Cluster channels that are alike."""
