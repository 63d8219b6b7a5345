"""Cut a graph into pieces that run on their own."""
