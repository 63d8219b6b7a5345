"""Weights that are graph inputs as well: IR version 3 demands it, and some exporters went on with it.

From IR version 4 on such a weight is the default of an input that callers may feed, so ONNX Runtime can neither fold it
nor fuse the nodes that read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

FREE = 4  # IR version from which on an initializer need not be an input
FEW = 8  # inputs with a default value that a model may have


def listed(model: ir.Model) -> tuple[ir.Value, ...]:
    """Return the initializers of a model that are inputs as well."""
    return tuple(value for value in model.graph.inputs if value.name in model.graph.initializers)


def settings(model: ir.Model) -> tuple[ir.Value, ...]:
    """Return those of them that somebody made inputs on purpose: a few, where most constants are none.

    A file that lists many of its constants does so because its exporter did with all of them, and tools may have added
    others since; before IR version 4 there was no choice.
    """
    found = listed(model)
    constants = len(model.graph.initializers) + sum(node.op_type == "Constant" for node in model.graph)
    few = len(found) <= FEW and 2 * len(found) < constants
    return found if few and model.ir_version >= FREE else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlisted:
    """What was changed in a model: names of the weights that were inputs, and the IR version it had."""

    names: tuple[str, ...]
    ir_version: int

    @property
    def overridable(self) -> bool:
        """Return True if ONNX Runtime had to expect other numbers for them."""
        return bool(self.names) and self.ir_version >= FREE


NOTHING = Unlisted(names=(), ir_version=FREE)


def unlist(model: ir.Model) -> Unlisted:
    """Take the weights out of the inputs of a model, in place.  Settings stay inputs."""
    done = Unlisted(names=tuple(value.name or "" for value in _wholesale(model)), ir_version=model.ir_version)
    for value in _wholesale(model):
        model.graph.inputs.remove(value)
    if done.names:
        model.ir_version = max(model.ir_version, FREE)
    return done


def relisted(model: ir.Model, done: Unlisted) -> ir.Model:
    """Return a model as it was before its weights were taken out of the inputs."""
    if not done.names:
        return model
    whole = model.clone()
    whole.meta.update(model.meta)
    whole.graph.inputs.extend(whole.graph.initializers[name] for name in done.names)
    whole.ir_version = done.ir_version
    return whole


def _wholesale(model: ir.Model) -> list[ir.Value]:
    kept = settings(model)
    return [value for value in listed(model) if value not in kept]


def unlisted_text(done: Unlisted) -> str:
    """Return what to say of weights that are taken out of the inputs; empty if there are none."""
    if not done.names:
        return ""
    what = f"{_count(len(done.names))} also graph inputs"
    if done.overridable:
        what += ", which keeps ONNX Runtime from folding them and fusing the nodes that read them"
    return f"{what}; the result has them as constants (--keep-initializer-inputs leaves them inputs)"


def listed_text(model: ir.Model) -> str:
    """Return what to say of a model whose weights stay inputs; empty if none does or it costs nothing."""
    count = len(_wholesale(model))
    if not count or model.ir_version < FREE:
        return ""
    return f"{_count(count)} still graph inputs, which keeps ONNX Runtime from folding and fusing them"


def _count(number: int) -> str:
    return "1 weight is" if number == 1 else f"{number} weights are"
