"""Write decisions into a graph."""
