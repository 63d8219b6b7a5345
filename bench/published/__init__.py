"""Measure published methods beside the default at equal parameters, on the embedded language model.

    python -m bench.published [--methods FLAP ...] [--sizes 70% ...] [--out FILE]

The methods are short re-implementations of ours in numpy, after the papers that their docstrings name.  They work on
the weights of `char_llama.onnx` and on the calibration data that the default gets.  Results have the narrow shapes:
their parameters are those of arrays, counted like those of a written file.  A method gets the fewest parameters that
its steps allow and that are not fewer than ours.  Choices that a paper leaves to the reader are made by the perplexity
of the calibration data.  `bench/results/published.json` holds the rows, and `docs/fidelity.md` shows them.
"""
