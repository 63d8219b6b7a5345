"""The registry: how channels pass through an op, and how a node of it is rewritten when they go.

`@rule("Reshape", since=5)` registers a function `(site) -> None` that states how marks flow.  `@narrow("Reshape")`
registers a function `(cut) -> None` that repairs what weights alone do not say: attributes, shape operands, sizes.
Both live in this folder, so adding an op is one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.facts import OWN
from onnxgrail.graph.trace.flow import Site

Rule = Callable[[Site], None]
Narrow = Callable[[Cut], None]

_RULES: dict[tuple[str, str], list[tuple[int, Rule]]] = {}
_NARROWS: dict[tuple[str, str], Narrow] = {}
_STANDARD = ("", "ai.onnx")


def rule(*ops: str, since: int = 1, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for ops from an opset on.  A second rule for the same op and opset is a mistake and raises."""

    def register(function: Rule) -> Rule:
        for op in ops:
            known = _RULES.setdefault((domain, op), [])
            if any(version == since for version, _ in known):
                raise ValueError(f"two rules for {op}-{since}")
            known.append((since, function))
            known.sort(key=lambda entry: entry[0])
        return function

    return register


def narrow(*ops: str, domain: str = "") -> Callable[[Narrow], Narrow]:
    """Register the rewriting of an op's nodes."""

    def register(function: Narrow) -> Narrow:
        for op in ops:
            if (domain, op) in _NARROWS:
                raise ValueError(f"two rewrites for {op}")
            _NARROWS[domain, op] = function
        return function

    return register


def find_rule(domain: str, op: str, version: int) -> Rule | None:
    """The newest rule that is not newer than the model's opset."""
    known = _RULES.get(("" if domain in _STANDARD else domain, op), [])
    found = [function for since, function in known if since <= version]
    return found[-1] if found else None


def find_narrow(domain: str, op: str) -> Narrow | None:
    """The op's rewrite, if weights alone do not do."""
    return _NARROWS.get(("" if domain in _STANDARD else domain, op))


class Row(NamedTuple):
    """One rule, for the documentation: `passing` is its first line, `rewritten` that of the op's rewrite or ''."""

    domain: str
    op: str
    since: int
    rewritten: str
    passing: str

    @property
    def family(self) -> tuple[str, str, int, str]:
        """Everything but the op: rows that agree in it share a line."""
        return self.domain, self.passing, self.since, self.rewritten


def table() -> list[Row]:
    """Every rule of an op that files have, sorted by domain, op and opset."""
    return sorted(
        Row(domain, op, since, _first_line(_NARROWS.get((domain, op))), _first_line(function))
        for (domain, op), entries in _RULES.items()
        if domain != OWN
        for since, function in entries
    )


def _first_line(function: Callable[..., None] | None) -> str:
    return ((function.__doc__ or "") if function else "").strip().split("\n", maxsplit=1)[0]
