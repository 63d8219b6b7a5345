"""Give `onnxgrail` odd recipes, reports, statistics, kept runs and options, and see that it says so in one line.

    python bench/fuzz_choices.py [--count 2000] [--seed 0] [--first 0] [--workers 1] [--threads 1]

Options are those that commands and library calls have, whatever they are.  Counted as a fault is what
`bench/mutations.py` counts, and Python that runs though no command named it.
"""

from __future__ import annotations

import sys

from mutations import main

if __name__ == "__main__":
    sys.exit(main(__doc__, kind="choices", count=2000))
