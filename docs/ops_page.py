"""Write `docs/ops.md` from the rules themselves: `python docs/ops_page.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from onnxgrail.graph import ops  # noqa: F401  registers the rules
from onnxgrail.graph.ops.rule import table

HEAD = """# Ops that channels pass through

This page lists every op that onnxgrail follows channels through. If an op is not listed, the channels that reach it are
left alone, and the report names the node. *Rewritten* says what changes in the node besides its weights. Each op is
tested against the original with channels set to zero (`tests/contract/`). The page is generated from
`onnxgrail/graph/ops/` by `docs/ops_page.py`.

| domain | op | since opset | how channels pass | rewritten |
| --- | --- | ---: | --- | --- |
"""


def page() -> str:
    """Return the whole page; ops of one family that share a rule are on one line."""
    rows = sorted(table(), key=lambda row: (row.domain, row.passing, row.since, row.rewritten, row.op))
    lines = []
    for (domain, passing, since, rewritten), members in groupby(rows, key=lambda r: r.family):
        names = ", ".join(f"`{row.op}`" for row in members)
        lines.append(f"| {domain or 'ai.onnx'} | {names} | {since} | {passing} | {rewritten or '—'} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("ops.md").write_text(page(), encoding="utf-8")
