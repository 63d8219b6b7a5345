"""Write docs/coverage.md: a zoo of exported graphs, each narrowed and compared with a mask oracle.

    python bench/zoo_coverage.py ZOO [--ratio 0.5] [--out docs/coverage.md]

ZOO is a folder of graph skeletons with a manifest, `skeleton.py` to unpack them and `conformance.py` with the oracle:
the narrowed model must equal the original with the removed positions of every consumer set to zero.  Shares count
float parameters only, so they are small for quantized graphs, whose weights are integers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import onnx

SECONDS = 60
QUANTIZED = re.compile(r"quanti[sz]ed")


class Row(NamedTuple):
    """One graph: its exporter, its kind of network, and the result."""

    name: str
    family: str
    exporter: str
    kind: str
    verdict: str
    blocks: int
    removed: float
    note: str


def kind_of(model: onnx.ModelProto, exporter: str) -> str:
    """Return the kind of network, by the place of its weights and by its ops."""
    if QUANTIZED.search(exporter):
        return "quantized"
    sizes = {t.name: len(t.raw_data) or 1 for t in model.graph.initializer}
    ops = Counter(node.op_type for node in model.graph.node)
    convolved = sum(sizes.get(n.input[1], 0) for n in model.graph.node if "Conv" in n.op_type and len(n.input) > 1)
    if convolved > sum(sizes.values()) / 2:
        return "convolutional"
    attends = ops["Softmax"] or any("Attention" in op for op in ops)
    return "transformer" if attends else "other"


def unlisted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove weights from the inputs of a model, as `compress` does: the oracle compares lists of inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) < len(model.graph.input):
        model.ir_version = max(model.ir_version, 4)
        del model.graph.input[:]
        model.graph.input.extend(inputs)
    return model


def rows_of(zoo: Path, ratio: float) -> list[Row]:
    """Narrow every graph of the zoo."""
    sys.path.insert(0, str(zoo))
    import conformance
    import skeleton

    packed = skeleton.unpack
    skeleton.unpack = lambda data: unlisted(packed(data))
    found = []
    for entry in json.loads((zoo / "manifest.json").read_text(encoding="utf-8"))["models"]:
        model = skeleton.unpack((zoo / entry["file"]).read_bytes())
        try:
            verdict, note, _, removed = conformance.check(entry, str(zoo), ratio, SECONDS)
        except NotImplementedError as error:
            verdict, note, removed = "unchecked", str(error), 0.0
        if not entry.get("runs", True) and verdict == "refused":
            verdict = "does not run"
        blocks = re.match(r"(\d+) blocks", note)
        exporter = entry["exporter"]
        kind = kind_of(model, exporter)
        count = int(blocks[1]) if blocks else 0
        found.append(Row(entry["name"], entry["family"], exporter, kind, verdict, count, removed, note))
        print(*found[-1][:6], f"{removed:.1%}", file=sys.stderr, flush=True)
    return found


def page(rows: Sequence[Row], ratio: float) -> str:
    """Return the page as Markdown."""
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("onnxgrail", "onnxruntime"))
    tally = Counter(r.verdict for r in rows)
    head = f"""\
This page shows which exported graphs onnxgrail can prune, by family of model and by exporter.
`bench/zoo_coverage.py` wrote it on {datetime.now(UTC).date()} ({versions}):
{len(rows)} graphs of exporters and optimizers, narrowed at unit ratio {ratio:g} without compensation,
all kinds of blocks. The verdicts are:

- *exact*: the narrowed model equals the original with the same channels set to zero,
- *nothing*: no block can be narrowed, and the reason is given,
- *does not run*: ONNX Runtime cannot run the original graph either,
- *unchecked*: packed four-bit weights, which this script cannot mask; the proof inside onnxgrail holds."""
    lines = [
        "# Coverage",
        "",
        head,
        "",
        "; ".join(f"{count} {verdict}" for verdict, count in tally.most_common()) + ".",
        "",
        "| kind of network | exact | mean share of float parameters removed |",
        "|---|---|---|",
    ]
    for kind in ("convolutional", "transformer", "other", "quantized"):
        some = [r.removed for r in rows if r.kind == kind and r.verdict == "exact"]
        if some:
            lines.append(f"| {kind} | {len(some)} | {mean(some):.1%} |")
    lines += ["", "| family | exporter | graphs | blocks | removed | verdict |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.family, row.exporter].append(row)
    for (family, exporter), some in sorted(groups.items()):
        verdicts = ", ".join(f"{v} {c}" if len(some) > 1 else v for v, c in Counter(r.verdict for r in some).items())
        blocks, removed = _span([r.blocks for r in some], "d"), _span([r.removed for r in some], ".0%")
        lines.append(f"| {family} | {exporter} | {len(some)} | {blocks} | {removed} | {verdicts} |")
    left = [r for r in rows if r.verdict not in ("exact", "does not run")]
    lines += ["", "## Left alone", "", "| graph | verdict | why |", "|---|---|---|"]
    lines += [f"| {r.name} | {r.verdict} | {_why(r.note)} |" for r in left]
    return "\n".join(lines) + "\n"


def _span(values: Sequence[float], form: str) -> str:
    low, high = (format(v, form) for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _why(note: str) -> str:
    return note.removeprefix("Error: nothing could be compressed: ").replace("|", "/")


def main() -> None:
    """Run the zoo and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("docs/coverage.md"))
    args = parser.parse_args()
    found: list[Any] = rows_of(args.zoo, args.ratio)
    args.out.write_text(page(found, args.ratio), encoding="utf-8")
    for kind in sorted({r.kind for r in found}):
        some = [r.removed for r in found if r.kind == kind and r.verdict == "exact"]
        if some:
            print(f"{kind}: {len(some)} exact, {mean(some):.1%} of float parameters removed")
    print(dict(Counter(r.verdict for r in found)))


if __name__ == "__main__":
    main()
