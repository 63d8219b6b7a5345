"""Run `onnxgrail` with odd recipes, reports, statistics, resume folders and options; check for one-line errors.

    python bench/fuzz_choices.py [--count 2000] [--seed 0] [--first 0] [--workers 1] [--threads 1]

The options are read from the commands and library calls.  Faults are those of `bench/mutations.py`, and Python code
that runs though no command named it.
"""

from __future__ import annotations

import sys

from mutations import main

if __name__ == "__main__":
    sys.exit(main(__doc__, kind="choices", count=2000))
