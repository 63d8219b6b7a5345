"""Measure the cost of compression, as a multiple of one forward pass over the same data with the same threads.

    python -m bench.speed [--only NAME ...] [--rounds N] [--threads T] [--minilm DIR]

Every cell is written to `bench/results/speed.json` as soon as it is measured and printed as one line of JSON, and
`docs/performance.md` is written from that file.  `nets.py` creates models with random weights, which take as long to
run as trained ones; MiniLM is measured if a folder with `minilm.dynamo.onnx` and `calib128.npz` is given.
"""
