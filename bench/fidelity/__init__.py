"""Quality by method and ratio, with everything else a reader wants to know: size, work and time.

    python -m bench.fidelity [--models ...] [--ratios ...] [--draws N] [--methods ...]

One command from nothing to `bench/results/fidelity.json`, the figures in `docs/img/` and `docs/fidelity.md`.  Every
cell is written as soon as it is measured, and cells that are there already are not measured again, so a run may be
stopped at any time.  Methods that the installed onnxgrail does not know are named and left out; they join in the run
after they appear.
"""
