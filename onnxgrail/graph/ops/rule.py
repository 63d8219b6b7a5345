"""The registry of op rules: how channels pass through an op, and how its nodes are rewritten when narrowed.

`@rule("Reshape", since=5)` registers a function `(site) -> None` that states how marks pass.  `@narrow("Reshape")`
registers a function `(cut) -> None` that updates what depends on sizes besides weights: attributes and shape operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from onnxgrail.errors import OnnxGrailError, UsageError, raised
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.facts import OWN
from onnxgrail.graph.trace.flow import Site

Rule = Callable[[Site], None]
Narrow = Callable[[Cut], None]

_RULES: dict[tuple[str, str], list[tuple[int, Rule]]] = {}
_NARROWS: dict[tuple[str, str], Narrow] = {}
PLUGINS = "onnxgrail.ops"  # group of entry points: a name `domain.Op` and the module with its rule


def rule(*ops: str, since: int = 1, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a channel rule for ops.

    Args:
        ops: names of the ops.
        since: first opset version that the rule covers.
        domain: domain of the ops; empty for the standard.

    Raises:
        ValueError: an op already has a rule for this opset.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            known = _RULES.setdefault((domain, op), [])
            if any(version == since for version, _ in known):
                raise ValueError(f"two rules for {op}-{since}")
            known.append((since, function))
            known.sort(key=lambda entry: entry[0])
        return function

    return register


def refused(*ops: str, why: str, told: str, since: int = 1, domain: str = "") -> None:
    """Register ops that freeze the channels of all their inputs.

    Args:
        ops: names of the ops.
        why: the reason, in which {} stands for the op.
        told: the same for the documentation.
        since: first opset version that the rule covers.
        domain: domain of the ops; empty for the standard.
    """

    def refuse(site: Site) -> None:
        site.refuse(why.format(site.node.op_type))

    refuse.__doc__ = told
    rule(*ops, since=since, domain=domain)(refuse)


def narrow(*ops: str, domain: str = "") -> Callable[[Narrow], Narrow]:
    """Register the rewrite of an op's nodes.

    Args:
        ops: names of the ops.
        domain: domain of the ops; empty for the standard.

    Raises:
        ValueError: an op already has a rewrite.
    """

    def register(function: Narrow) -> Narrow:
        for op in ops:
            if (domain, op) in _NARROWS:
                raise ValueError(f"two rewrites for {op}")
            _NARROWS[domain, op] = function
        return function

    return register


def find_rule(domain: str, op: str, version: int) -> Rule | None:
    """Return the newest rule that is not newer than the model's opset; None if there is none."""
    if (domain, op) not in _RULES:
        _import_plugin(domain, op)
    known = _RULES.get((domain, op), [])
    found = [function for since, function in known if since <= version]
    return found[-1] if found else None


@functools.cache
def _plugins() -> metadata.EntryPoints:
    return metadata.entry_points(group=PLUGINS)  # reads the metadata of all installed packages


@functools.cache
def _import_plugin(domain: str, op: str) -> None:
    """Import the installed module that declares a rule for an op, if there is one.

    Raises:
        UsageError: it cannot be imported or registers none, or two packages declare one.
    """
    entries = list(_plugins().select(name=f"{domain}.{op}" if domain else op))
    owners = sorted({found.dist.name if found.dist is not None else found.value for found in entries})
    if len(owners) > 1:
        text = f"{' and '.join(owners)} both have a rule for {domain}.{op}"
        raise UsageError(text, hint="Uninstall all but one of them")
    for found, owner in zip(entries, owners, strict=True):
        label, before = f"the rule for {domain}.{op} of the package {owner}", {**_RULES}
        try:
            found.load()
        except Exception as error:
            _RULES.clear()
            _RULES.update(before)
            raise UsageError(f"{label} cannot be imported: {error}", hint=f"Update or remove {owner}") from error
        if (domain, op) not in _RULES:
            raise UsageError(f"{label} is not there: {found.value} registers none", hint=f"Update or remove {owner}")
        for name in _RULES.keys() - before.keys():
            _RULES[name] = [(since, _guarded(label, function)) for since, function in _RULES[name]]


def _guarded(label: str, function: Rule) -> Rule:
    """Return the rule of a package; an error that it raises names the package and the node."""

    @functools.wraps(function)
    def guarded(site: Site) -> None:
        try:
            function(site)
        except (OnnxGrailError, MemoryError):
            raise
        except Exception as error:
            raise UsageError(f"{label} {raised(error)} at node {site.node.name!r}") from error

    return guarded


def find_narrow(domain: str, op: str) -> Narrow | None:
    """Return the op's rewrite; None if cutting its weights is enough."""
    return _NARROWS.get((domain, op))


class Row(NamedTuple):
    """A rule as shown in the documentation.

    Attributes:
        domain, op, since: the op and the first opset of the rule.
        rewritten: first docstring line of the op's rewrite, '' if there is none.
        passing: first docstring line of the rule.
    """

    domain: str
    op: str
    since: int
    rewritten: str
    passing: str

    @property
    def family(self) -> tuple[str, str, int, str]:
        """Return everything but the op: rows with equal values share a line."""
        return self.domain, self.passing, self.since, self.rewritten


def table() -> list[Row]:
    """Return the rules of all ops that occur in files, sorted by domain, op and opset."""
    return sorted(
        Row(domain, op, since, _first_line(_NARROWS.get((domain, op))), _first_line(function))
        for (domain, op), entries in _RULES.items()
        if domain != OWN
        for since, function in entries
    )


def _first_line(function: Callable[..., None] | None) -> str:
    return ((function.__doc__ or "") if function else "").strip().split("\n", maxsplit=1)[0]
