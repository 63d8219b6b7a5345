"""`python -m bench.published`: measure all rows of the models, and write them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import onnxgrail
from bench.published import methods, pruning, subjects, transformer
from bench.published.methods import Dense, Floats, Plan, Plans
from bench.published.page import OURS, RESULTS
from bench.published.subjects import Feed, Subject
from onnxgrail.commands.demo import machine
from onnxgrail.fidelity import intervals
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file

ROOM = 0.06  # parameters more than ours that a method may need for its next step
BATCH = 8
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
    """Parse the options, measure, and write the rows of every model into the file."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument(
        "--models", nargs="*", choices=("char_llama", "digits_vit"), default=("char_llama", "digits_vit")
    )
    parser.add_argument("--minilm", nargs=3, type=Path, metavar=("MODEL", "CALIB", "HELDOUT"))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    for subject in chosen(args.models, args.minilm):
        found = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
            "version": onnxgrail.__version__,
            "measure": subject.measure,
            "params": counting.parameters(model_file.load(subject.model)),
            "dense": measure(subject, subject.judged(subject.network(subject.net))),
            "samples": [len(next(iter(feed.values()))) for feed in (subject.calibration, subject.heldout)],
            "without": {name: why for name, why in subject.without.items() if name in args.methods},
            "rows": list(rows(subject, args.methods, args.sizes or subject.sizes)),
        }
        data = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        args.out.write_text(json.dumps(data | {subject.name: found}, indent=1) + "\n", encoding="utf-8")


def chosen(names: Sequence[str], files: Sequence[Path] | None) -> Iterator[Subject]:
    """Yield the embedded models of these names, and the sentence encoder of these files."""
    yield from (getattr(subjects, name)() for name in names)
    if files:
        yield subjects.minilm(*files)


def rows(subject: Subject, names: Sequence[str], sizes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model: at every size the default, the default with fewer ways, and the methods."""
    dense = methods.measured(subject.net, subject.read(subject.calibration))
    plans = {name: METHODS[name](dense) for name in names if name not in subject.without}
    for size in sizes:
        params, losses = compressed(subject, size, {})
        yield told({"method": OURS, "size": size, "params": params, "value": measure(subject, losses)})
        for name, choices in subject.alone.items():
            less, others = compressed(subject, size, choices)
            yield told({"method": name, "size": size, "params": less, **beside(subject, others, losses)})
        for name, options in plans.items():
            yield told({"method": name, "size": size, **judged(subject, options, params, losses)})


def told(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row, and return it."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def compressed(subject: Subject, size: str, choices: Mapping[str, Any]) -> tuple[int, Floats]:
    """Compress to a size with the defaults and these choices; return the parameters and the held-out losses."""
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        file = Path(folder) / "out.onnx"
        done = onnxgrail.compress(
            subject.model, file, data=subject.calibration, target_params=size, force=True, **choices
        )
        losses = subject.judged(partial(runtime, ort.InferenceSession(file)))
    return int(done.report.data["model"]["params_after"]), losses


def runtime(session: ort.InferenceSession, feed: Feed) -> Any:
    """Return the first output of a file for samples."""
    names = [i.name for i in session.get_inputs()]
    starts = range(0, len(feed[names[0]]), BATCH)
    return np.concatenate([session.run(None, {n: feed[n][at : at + BATCH] for n in names})[0] for at in starts])


def measure(subject: Subject, losses: Floats) -> float:
    """Return the measure of sums and counts by sample."""
    return round(float(subject.value(losses.sum(axis=0))), 4)


def judged(subject: Subject, plans: Plans, params: int, others: Floats) -> dict[str, Any]:
    """Return a row: the choice that is best on calibration data, judged on held-out data beside other losses."""
    made = {choice: made_of(plan) for choice, sizes in plans.items() if (plan := nearest(sizes, params))}
    if not made:
        return {"failed": "has no step of that size"}
    choice = next(iter(made))
    if len(made) > 1:
        choice = min(made, key=lambda name: calibrated(subject, made[name]))
    losses = subject.judged(subject.network(made[choice]))
    row = {"params": transformer.parameters(made[choice]), **beside(subject, losses, others)}
    return row | ({"choice": choice} if choice else {})


def beside(subject: Subject, losses: Floats, others: Floats) -> dict[str, Any]:
    """Return the measure, and the interval of how far it is above that of other losses of the same samples."""

    def difference(sums: Floats) -> Floats:
        return subject.value(sums[..., :2]) - subject.value(sums[..., 2:])

    interval = intervals.of_samples(np.column_stack([losses, others]), difference)
    assert interval is not None, "measures are not finite"
    return {"value": measure(subject, losses), "more": [round(end, 4) for end in interval]}


def nearest(plans: Sequence[Plan], params: int) -> Plan | None:
    """Return the plan with the fewest parameters that has not fewer than these, None if it has many more."""
    plan = min((plan for plan in plans if plan.params >= params), key=lambda plan: plan.params, default=None)
    return plan if plan is not None and plan.params <= (1 + ROOM) * params else None


def made_of(plan: Plan) -> transformer.Net:
    """Make the network of a plan, and check its size."""
    net = plan.make()
    assert transformer.parameters(net) == plan.params, "the arrays are not those of the plan"
    return net


def calibrated(subject: Subject, net: transformer.Net) -> float:
    """Return the measure of a network on the calibration samples."""
    return float(subject.value(subject.judged(subject.network(net), heldout=False).sum(axis=0)))


if __name__ == "__main__":
    main()
