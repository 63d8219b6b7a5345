"""Op rules of layers with weights or states: convolution, matrix products, attention, recurrence."""
