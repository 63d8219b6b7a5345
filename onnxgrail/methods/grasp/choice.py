"""Chooses the matrices to replace: those of the most redundant layers, or those that are named."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.algebra.fit.lowrank import rank_of, saving
from onnxgrail.core import KINDS, Block, Recipe, Refusal
from onnxgrail.errors import UsageError
from onnxgrail.graph.cuts.residual import Layer
from onnxgrail.graph.fittable.matrices import Matrix, matrices, refusal
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.amounts import whole
from onnxgrail.recipe.selection import named

ALL = "all"
OUTSIDE = ""  # the layer of a matrix that is in none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """The matrices that could be replaced.

    Attributes:
        layers: in the order of the network.
        matrices: by layer, those that the recipe's names allow; under `OUTSIDE` those of no layer.
        refusals: by layer, weights that have no low-rank form.
        blocks: by weight, names of the blocks that contain it, as `inspect` lists them.
    """

    layers: tuple[Layer, ...]
    matrices: Mapping[str, tuple[Matrix, ...]]
    refusals: Mapping[str, tuple[Refusal, ...]]
    blocks: Mapping[str, tuple[str, ...]]

    @property
    def params(self) -> int:
        """Return the number of parameters of all matrices in layers, each counted once."""
        inside = {m.weight: m.inputs * m.outputs for layer in self.layers for m in self.matrices[layer.name]}
        return sum(inside.values())

    @property
    def left_out(self) -> str:
        """Return how many matrices are in no layer, and what includes them; empty if there are none."""
        count = len(self.matrices[OUTSIDE])
        some, them = ("1 matrix is", "it") if count == 1 else (f"{count} matrices are", "them")
        return f"{some} in no layer: --grasp-layers all --include '.*' has {them}, too" if count else ""

    def saves(self, layer: str, retain: float) -> int:
        """Return the number of parameters that a layer's matrices save."""
        sizes = ((m.inputs, m.outputs) for m in self.matrices[layer])
        return sum(max(saving(i, o, rank_of(i, o, retain)), 0) for i, o in sizes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chosen:
    """The chosen matrices by layer, in the order of the network; `notes` are messages on what could not be done."""

    matrices: Mapping[str, tuple[Matrix, ...]]
    notes: tuple[str, ...] = ()


def candidates(
    model: ir.Model, layers: Sequence[Layer], blocks: Sequence[Block], fixed: Collection[str], recipe: Recipe
) -> Candidates:
    """Return all matrices in a graph that could be replaced under the recipe's `include` and `exclude`.

    If no blocks are narrowed, the recipe's `blocks` limit the matrices, too.
    """
    known, wanted = matrices(model), named(recipe)
    inner = [b for b in blocks if b.kind != "stream"]
    held = {m.weight: tuple(b.name for b in inner if _holds(b, m)) for m in known.values()}
    asked = [b for b in blocks if b.kind in recipe.blocks]
    limited = "grail" not in recipe.method and set(recipe.blocks) != set(KINDS)
    owner: dict[ir.Node, str] = {}
    for layer in layers:
        owner.update(dict.fromkeys((n for n in layer.nodes if n not in owner), layer.name))
    inside: dict[str, dict[str, Matrix]] = {name: {} for name in [*(layer.name for layer in layers), OUTSIDE]}
    refusals: dict[str, list[Refusal]] = {name: [] for name in inside}
    for node in model.graph:
        name, why = owner.get(node, OUTSIDE), refusal(node, known, fixed)
        matrix = known.get(node)
        if matrix is not None and limited and not any(_holds(b, matrix) for b in asked):
            continue
        if matrix is not None and wanted((name, *matrix.names, *held[matrix.weight])):
            inside[name].setdefault(matrix.weight, matrix)
        if why is not None and wanted((name, why.value, why.node, key(node))):
            refusals[name].append(why)
    return Candidates(
        layers=tuple(layers),
        matrices={name: tuple(found.values()) for name, found in inside.items()},
        refusals={name: tuple(found) for name, found in refusals.items()},
        blocks=held,
    )


def _holds(block: Block, matrix: Matrix) -> bool:
    """Return True if a matrix computes or reads a block's channels."""
    return any(slot.initializer == matrix.weight for slot in (*block.producers, *block.consumers))


def choose(found: Candidates, redundancy: Mapping[str, float], recipe: Recipe) -> Chosen:
    """Choose matrices as the recipe requests.

    Args:
        found: the candidates.
        redundancy: per layer, the similarity of its input and its output.
        recipe: `grasp_layers` and `ratio`, a share of the parameters in layers.

    Raises:
        UsageError: a name does not exist, or there are fewer layers than requested.
    """
    asked = recipe.grasp_layers
    able = [layer.name for layer in found.layers if found.matrices[layer.name]]
    by_redundancy = sorted(able, key=lambda name: -redundancy[name])  # ties go to the first layer
    if asked is None:
        return _by_ratio(found, by_redundancy, recipe)
    if asked == ALL:
        if recipe.include is not None:
            return _in_order(found, found.matrices)
        return _in_order(found, {name: found.matrices[name] for name in able}, (found.left_out,))
    count = whole(asked)
    if count is not None:
        if not able:
            return Chosen(matrices={}, notes=("grasp: no layer has a matrix that could be replaced",))
        if not 1 <= count <= len(able):
            raise UsageError(f"--grasp-layers {count}: there are {len(able)} layers with matrices to replace")
        return _in_order(found, {name: found.matrices[name] for name in by_redundancy[:count]})
    return _named(found, [word.strip() for word in asked.split(",") if word.strip()])


def _by_ratio(found: Candidates, order: Sequence[str], recipe: Recipe) -> Chosen:
    """Choose as many layers as needed to lose a share of the parameters in layers."""
    taken: dict[str, tuple[Matrix, ...]] = {}
    gone = 0
    wanted = (recipe.ratio or 0.0) * found.params
    for name in order:
        if gone >= wanted:
            break
        taken[name] = found.matrices[name]
        gone += found.saves(name, recipe.grasp_retain)
    short = gone < wanted
    text = f"grasp: all {len(order)} layers together lose {gone / max(found.params, 1):.1%} of their parameters"
    notes = (f"{text}, and --ratio asked for {recipe.ratio:.1%}",) if short and order else ()
    return _in_order(found, taken, notes)


def _named(found: Candidates, words: Sequence[str]) -> Chosen:
    """Choose layers and matrices by name."""
    taken: dict[str, dict[str, Matrix]] = {}
    for word in words:
        mine = [(word, m) for m in found.matrices.get(word, ())] if word else []
        every = [(layer, m) for layer, some in found.matrices.items() for m in some]
        mine = mine or [(layer, m) for layer, m in every if word in (*m.names, *found.blocks[m.weight])]
        if not mine:
            why = next((r.reason for some in found.refusals.values() for r in some if word in (r.node, r.value)), "")
            names = ", ".join(layer.name for layer in found.layers) or "none"
            raise UsageError(
                f"--grasp-layers: {word!r} "
                + (f"cannot be replaced: {why}" if why else "is not a layer, block, node or weight"),
                hint=f"Layers are: {names}",
            )
        for layer, matrix in mine:
            taken.setdefault(layer, {})[matrix.weight] = matrix
    return _in_order(found, {layer: tuple(some.values()) for layer, some in taken.items()})


def _in_order(found: Candidates, taken: Mapping[str, tuple[Matrix, ...]], notes: tuple[str, ...] = ()) -> Chosen:
    """Return layers in the order of the network."""
    names = [name for name in [*(layer.name for layer in found.layers), OUTSIDE] if taken.get(name)]
    return Chosen(matrices={name: taken[name] for name in names}, notes=notes)


def sharing(found: Candidates, chosen: Chosen) -> list[tuple[Matrix, str]]:
    """Return chosen matrices that are shared with layers that are not chosen, with the name of such a layer."""
    taken = {m.weight: m for some in chosen.matrices.values() for m in some}
    holders = {
        weight: [name for name, some in found.matrices.items() if any(m.weight == weight for m in some)]
        for weight in taken
    }
    left = {
        w: [n for n in names if all(m.weight != w for m in chosen.matrices.get(n, ()))] for w, names in holders.items()
    }
    return [(taken[weight], names[0] or "the rest of the model") for weight, names in left.items() if names]
