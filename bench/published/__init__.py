"""Measure published methods beside the default at equal parameters, on transformers of ours and of others.

    python -m bench.published [--models NAME ...] [--minilm MODEL CALIB HELDOUT] [--methods FLAP ...] [--out FILE]

The models are the embedded `char_llama` and `digits_vit`, and a sentence encoder whose files `bench/minilm_export.py W`
and `bench/minilm_text.py W` write (W/minilm.dynamo.onnx, W/calib.npz, W/heldout.npz).

The methods are short re-implementations of ours in numpy, after the papers that their docstrings name.  They work on
the weights of the file and on the calibration data that the default gets.  Results have the narrow shapes: their
parameters are those of arrays, counted like those of a written file.  A method gets the fewest parameters that its
steps allow and that are not fewer than ours.  Choices that a paper leaves to the reader are made by the measure on the
calibration data.  `bench/results/published.json` holds the rows by model, and `docs/fidelity.md` shows them.
"""
