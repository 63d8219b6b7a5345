"""Clusters similar units."""
