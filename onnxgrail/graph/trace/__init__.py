"""The channel tracer: labels, flow through the ops, blocks."""
