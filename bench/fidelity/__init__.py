"""Measure fidelity by method and ratio, with size, multiply-accumulates and time.

    python -m bench.fidelity [--models ...] [--ratios ...] [--draws N] [--methods ...]

The command writes `bench/results/fidelity.json`, the figures in `docs/img/` and `docs/fidelity.md`.  Every cell is
written as soon as it is measured, and existing cells are not measured again, so a run may be stopped at any time.
Methods that the installed onnxgrail does not have are named and skipped until a later run with a newer version.
"""
