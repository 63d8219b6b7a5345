"""Op rules of tensor operations: elementwise, shapes, slices, joins, reductions."""
