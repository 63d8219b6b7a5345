"""The search for the widths that cost least within a loss."""
