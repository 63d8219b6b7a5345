"""Write pruning decisions into a graph."""
