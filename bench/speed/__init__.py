"""What compressing costs, as a multiple of one plain forward pass over the same data with the same threads.

    python -m bench.speed [--only NAME ...] [--rounds N] [--threads T] [--minilm DIR]

Every cell is written to `bench/results/speed.json` as soon as it is measured and printed as one line of JSON, and
`docs/performance.md` is made from that file.  Models are made by `nets.py` with random weights, which cost as much to
run as trained ones; MiniLM is measured where a folder with `minilm.dynamo.onnx` and `calib128.npz` is named.
"""
