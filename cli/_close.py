"""How close the result is to the original, output by output, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _render as render

SHOWN = 6  # outputs with a line of their own: a model with caches has two for every layer
FAR = 0.9  # cosine below which a result is hardly of use


def lines(data: Any) -> list[str]:
    """One line per output for calibration samples, then for held-out ones; the worst where there are many."""
    verification = data["verification"]
    drawn = "synthetic" if (data.get("calibration") or {}).get("synthetic") else "calibration"
    found: list[str] = []
    for kind, checks in ((drawn, verification), ("held-out", verification.get("held_out") or {})):
        every = checks.get("outputs", ())
        shown = worst(every)
        found += [_line(check, kind) for check in shown]
        if len(shown) < len(every):
            left = len(every) - len(shown)
            found.append(f"{left} more outputs: cosine {_cosine(shown[-1]):.5f} or higher (see --report)")
    return found


def worst(checks: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Those that get a line: all where they are few, else the furthest from the original."""
    return checks if len(checks) <= SHOWN else sorted(checks, key=_cosine)[: SHOWN - 1]


def _cosine(check: Mapping[str, Any]) -> float:
    return 1.0 if check["cosine"] is None else float(check["cosine"])


def _line(check: Mapping[str, Any], kind: str) -> str:
    where = f" on {render.several(check['samples'], f'{kind} sample')}" if "samples" in check else ""
    if check["cosine"] is None and check.get("agreement") is not None:
        return f"Output {check['name']}: {render.share(check['agreement'])} of the values as in the original{where}"
    numbers = f"cosine {render.number(check['cosine'], '.5f')}, NMSE {render.number(check['nmse'], '.2e')}"
    return f"Output {check['name']}: {numbers} to the original{where}{render.scores(check)}"


def advice(data: Any) -> list[str]:
    """What a run suggests to do differently."""
    found = []
    last = data.get("quantization") or data["verification"]
    far = min((last.get("held_out") or last).get("outputs", ()), key=_cosine, default=None)
    if far is not None and _cosine(far) < FAR:
        found.append(
            f"output {far['name']!r} is far from the original (cosine {_cosine(far):.2f}): more real --data, a "
            "smaller --ratio or --selector obs bring it closer"
        )
    return found
