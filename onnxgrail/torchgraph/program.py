"""A graph as a sequence of torch operations: any named value can be fed, overridden and fetched.

Its outputs are compared with those of ONNX Runtime before its gradients are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxgrail.core import Array
from onnxgrail.errors import ModelError
from onnxgrail.graph.attributes import HALVES, names_of
from onnxgrail.graph.trace.facts import bodies, key
from onnxgrail.torchgraph.call import Call, Function, Tensor, as_array, as_tensor, unsupported
from onnxgrail.torchgraph.ops import find

LIMIT = {2: 3e-2, 4: 1e-3, 8: 1e-6}  # by bytes per element of the model's dtype


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """A node with the names of its operands ('' for missing operands) and of its outputs."""

    call: Call
    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A graph that torch can run.

    Attributes:
        steps: the nodes in order.
        weights: the initializers, sharing memory with the graph if types allow it.
        outputs: names of the graph's outputs.
        floats: the dtype used for all floating-point types, or None.
    """

    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    floats: torch.dtype | None = None
    _plans: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def run(
        self,
        feeds: Mapping[str, Tensor],
        fetch: Sequence[str] | None = None,
        override: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Compute named values; run only the nodes that they need.

        Args:
            feeds: inputs of the graph, or any values to start from.
            fetch: names of values; None for the graph's outputs.
            override: tensors that replace named values, weights or activations; set `requires_grad` to get gradients.

        Raises:
            UnsupportedOpError: a variant of an operator that is not implemented.
            KeyError: a value is neither fed nor computed.
        """
        wanted = tuple(self.outputs if fetch is None else fetch)
        given = {**feeds, **(override or {})}
        plan = self._plan(frozenset(given), wanted)
        last = {name: number for number in plan for name in self.steps[number].inputs}
        known: dict[str, Tensor] = {**self.weights, **given}
        for number in plan:
            step = self.steps[number]
            operands = [known[name] if name else None for name in step.inputs]
            found = step.function(step.call, *operands)
            values = found if isinstance(found, tuple | list) else (found,)
            made = zip(step.outputs, values, strict=False)
            known.update({name: value for name, value in made if name and name not in given})
            for name in step.inputs:  # frees values that autograd does not hold
                if name and last[name] == number and name not in given and name not in wanted:
                    known.pop(name, None)
        return {name: known[name] for name in wanted}

    def _plan(self, given: frozenset[str], wanted: tuple[str, ...]) -> tuple[int, ...]:
        """Return the numbers of the steps that these values need."""
        found = self._plans.get((given, wanted))
        if found is None:
            found = tuple(_needed(self.steps, given, wanted))
            self._plans[given, wanted] = found
        return found


def _needed(steps: Sequence[Step], given: Collection[str], wanted: Iterable[str]) -> list[int]:
    need, found = set(wanted) - set(given), []
    for number in range(len(steps) - 1, -1, -1):
        if need.intersection(steps[number].outputs):
            need.update(name for name in steps[number].inputs if name not in given)
            found.append(number)
    return found[::-1]


def program_of(model: ir.Model, *, floats: torch.dtype | None = None) -> Program:
    """Convert a model, or a subgraph, to a torch program.

    Args:
        model: must not contain local functions.
        floats: the dtype used for every floating-point type of the graph: float64 for exact gradients, float32 for
            models of half precision; None keeps the types.

    Raises:
        UnsupportedOpError: an operator without gradient.
    """
    steps = tuple(_step(node, model.opset_imports, floats) for node in model.graph)
    used = {name for step in steps for name in step.inputs} | {v.name for v in model.graph.outputs}
    weights = {
        name: as_tensor(value.const_value.numpy(), floats)
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and name in used and value.const_value.dtype != ir.DataType.STRING
    }
    return Program(steps=steps, weights=weights, outputs=tuple(names_of(model.graph.outputs)), floats=floats)


def trainable(model: ir.Model) -> Program:
    """Convert a model as `program_of` does; weights of half precision become float32, in which gradients do not vanish.

    Raises:
        UnsupportedOpError: an operator without gradient.
    """
    half = any(value.dtype in HALVES for value in model.graph.initializers.values())
    return program_of(model, floats=torch.float32 if half else None)


def tensors(feeds: Mapping[str, Array], floats: torch.dtype | None = None) -> dict[str, Tensor]:
    """Convert arrays to operands of a program."""
    return {name: as_tensor(np.asarray(array), floats) for name, array in feeds.items()}


def _step(node: ir.Node, versions: Mapping[str, int], floats: torch.dtype | None) -> Step:
    function = find(node.domain, node.op_type)
    if function is None or bodies(node):
        raise unsupported(node.domain, node.op_type, key(node))
    outputs = tuple(names_of(node.outputs))
    call = Call(
        op=node.op_type,
        domain=node.domain,
        version=versions.get(node.domain, 1),
        node=key(node),
        outputs=len(outputs),
        wanted=tuple(
            bool(v.name) and (number == 0 or bool(v.uses()) or v.is_graph_output())
            for number, v in enumerate(node.outputs)
        ),
        attributes={name: _plain(attribute, floats) for name, attribute in node.attributes.items()},
        floats=floats,
    )
    inputs = names_of(node.inputs)
    while inputs and not inputs[-1]:
        inputs.pop()
    return Step(call=call, function=function, inputs=tuple(inputs), outputs=outputs)


def _plain(attribute: ir.Attr, floats: torch.dtype | None) -> Any:
    """Return an attribute as a Python value."""
    if attribute.type == ir.AttributeType.TENSOR:
        return as_tensor(attribute.as_tensor().numpy(), floats)
    value = attribute.value
    return list(value) if isinstance(value, tuple | list) else value


def check(found: Mapping[str, Tensor], expected: Mapping[str, Array], name: str) -> float:
    """Check that torch and ONNX Runtime agree; return the largest relative difference over all values.

    Raises:
        ModelError: torch and ONNX Runtime disagree.
    """
    worst = 0.0
    for value, wanted in expected.items():
        got = as_array(found[value], np.dtype(np.float64))
        if got.shape != wanted.shape:
            raise _differ(name, value, f"shapes {list(got.shape)} and {list(wanted.shape)}")
        gap = distance(got, wanted.astype(np.float64))
        worst = max(worst, gap)
        limit = LIMIT.get(wanted.dtype.itemsize, 0.0) if wanted.dtype.kind in "fV" else 0.0
        if not gap <= limit:
            raise _differ(name, value, f"a relative difference of {gap:.1e}")
    return worst


def agree(program: Program, inputs: Mapping[str, Array], expected: Mapping[str, Array], name: str) -> None:
    """Run a program on inputs, and check its values.

    Raises:
        ModelError: torch and ONNX Runtime disagree.
    """
    with torch.no_grad():
        check(program.run(tensors(inputs, program.floats), list(expected)), expected, name)


def distance(got: Array, wanted: Array) -> float:
    """Return the norm of the difference relative to the norm of `wanted`; infinities of equal sign agree."""
    same = np.equal(got, wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        wrong = np.where(same, 0.0, got - wanted)
    norm = float(np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0).ravel()))
    error = float(np.linalg.norm(wrong.ravel()))
    return error / norm if norm else error


def _differ(name: str, value: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: torch and ONNX Runtime disagree on {value!r} ({what})",
        hint="No gradients are taken from such a part; please report the model",
    )
