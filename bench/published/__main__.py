"""`python -m bench.published`: measure all rows, and write them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import onnxgrail
from bench.published import llama, methods, pruning
from bench.published.methods import Dense, Floats, Plan, Plans
from bench.published.page import OURS, RESULTS
from onnxgrail.commands.demo import machine
from onnxgrail.fidelity import intervals
from onnxgrail.models import load, scores

SIZES = ("70%", "50%", "30%")
ROOM = 0.03  # parameters more than ours that a method may need for its next step
ALONE: dict[str, dict[str, Any]] = {
    f"{OURS}, `--blocks {','.join(blocks)}`": {"blocks": blocks} for blocks in (("mlp", "heads"), ("stream",))
}
METHODS: dict[str, Callable[[Dense], Plans]] = {
    "SliceGPT": methods.slicegpt,
    "SliceGPT, one rotation": partial(methods.slicegpt, one=True),
    "SVD-LLM": methods.svd_llm,
    "SVD-LLM with update": partial(methods.svd_llm, update=True),
    "FLAP": pruning.flap,
    "SlimGPT": pruning.slimgpt,
    "MoDeGPT": pruning.modegpt,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, and write all rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    embedded = load("char_llama")
    with np.load(embedded.calibration) as archive:
        ids = archive["input_ids"]
    dense = methods.measured(llama.read(embedded.model), ids)
    plans = {name: METHODS[name](dense) for name in args.methods}
    rows = []
    for size in args.sizes:
        params, losses = compressed(size, {})
        rows.append({"method": OURS, "size": size, "params": params, "perplexity": perplexity(losses)})
        for name, choices in ALONE.items():
            less, others = compressed(size, choices)
            rows.append({"method": name, "size": size, "params": less, **beside(others, losses)})
        for name in args.methods:
            rows.append({"method": name, "size": size, **judged(dense, plans[name], params, losses)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "version": onnxgrail.__version__,
        "model": {
            "name": embedded.name,
            "params": llama.parameters(dense.net),
            "perplexity": perplexity(held(dense.net)),
        },
        "rows": rows,
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compressed(size: str, choices: dict[str, Any]) -> tuple[int, Floats]:
    """Compress to a size with the defaults and these choices; return the parameters and the held-out losses."""
    embedded = load("char_llama")
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        file = Path(folder) / "out.onnx"
        done = onnxgrail.compress(
            embedded.model, file, data=embedded.calibration, target_params=size, force=True, **choices
        )
        session = ort.InferenceSession(file)
        losses = scores(embedded, lambda feed: session.run(None, feed))
    return int(done.report.data["model"]["params_after"]), losses


def held(net: llama.Net) -> Floats:
    """Return the losses of held-out samples: sums and counts."""
    return scores(load("char_llama"), lambda feed: [llama.logits(net, feed["input_ids"])])


def perplexity(losses: Floats) -> float:
    """Return the perplexity of sums and counts by sample."""
    total = losses.sum(axis=0)
    return round(float(np.exp(total[0] / total[1])), 4)


def judged(dense: Dense, plans: Plans, params: int, others: Floats) -> dict[str, Any]:
    """Return a row: the choice that is best on calibration data, judged on held-out data beside other losses."""
    made = {choice: made_of(plan) for choice, sizes in plans.items() if (plan := nearest(sizes, params))}
    choice = min(made, key=lambda name: calibrated(made[name], dense))
    row = {"params": llama.parameters(made[choice]), **beside(held(made[choice]), others)}
    return row | ({"choice": choice} if choice else {})


def beside(losses: Floats, others: Floats) -> dict[str, Any]:
    """Return a perplexity, and the interval of how far it is above that of other losses of the same samples."""

    def difference(sums: Floats) -> Floats:
        return np.exp(sums[..., 0] / sums[..., 1]) - np.exp(sums[..., 2] / sums[..., 1])

    interval = intervals.of_samples(np.column_stack([losses, others[:, 0]]), difference)
    assert interval is not None, "perplexities are not finite"
    return {"perplexity": perplexity(losses), "more": [round(end, 4) for end in interval]}


def nearest(plans: Sequence[Plan], params: int) -> Plan | None:
    """Return the plan with the fewest parameters that has not fewer than these, None if it has many more."""
    plan = min((plan for plan in plans if plan.params >= params), key=lambda plan: plan.params, default=None)
    return plan if plan is not None and plan.params <= (1 + ROOM) * params else None


def made_of(plan: Plan) -> llama.Net:
    """Make the network of a plan, and check its size."""
    net = plan.make()
    assert llama.parameters(net) == plan.params, "the arrays are not those of the plan"
    return net


def calibrated(net: llama.Net, dense: Dense) -> float:
    """Return the mean loss of the next characters of the calibration data."""
    out = llama.logits(net, dense.ids).astype(np.float64)[:, :-1]
    out -= out.max(axis=-1, keepdims=True)
    right = np.take_along_axis(out, dense.ids[:, 1:, None], axis=-1)[..., 0]
    return float((np.log(np.exp(out).sum(axis=-1)) - right).mean())


if __name__ == "__main__":
    main()
