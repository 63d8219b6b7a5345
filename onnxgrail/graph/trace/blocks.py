"""Group traced labels into blocks.

Label classes with the same members are interchangeable channels of one block; names and kinds are assigned afterwards.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import INNER, Block, Ints, Kind, Probe, Refusal, Role, Slot
from onnxgrail.graph.attributes import name_of
from onnxgrail.graph.flatten.inner import layers_inside
from onnxgrail.graph.notes import common_scope, scope
from onnxgrail.graph.rotate.marked import INSIDE, LINEAR, MARK, MEAN, is_cached, is_rotated
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.flow import ONE, Flow, Use
from onnxgrail.graph.trace.labels import TIED, Mark, cause
from onnxgrail.graph.trace.survey import Operand, Survey


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One axis of one constant, with the label class of every position and all its uses.

    `met` are the label classes on the axis of the activation that a consumer reads: `roots`, or repeated ones.
    """

    param: str
    value: str
    axis: int
    role: Role
    roots: Ints
    met: Ints
    uses: tuple[Use, ...]


def group(flow: Flow, model: ir.Model) -> Survey:
    """Group the traced labels into blocks and refusals."""
    frozen, ties = flow.labels.frozen(), flow.labels.ties()
    params = _params(flow)
    entries = _entries(flow, params)
    order = {key(node): position for position, node in enumerate(model.graph)}
    means = {name_of(node, 1) for node in model.graph if MEAN in node.metadata_props}  # each writes one channel only
    nodes = {key(node): node for node in model.graph}
    kinds, ranked = _kinds(flow), _ranked(flow)
    places = {root: place for place, root in enumerate(ranked)}
    families: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for root, signature in _signatures(entries).items():
        families[signature].append(root)
    blocks: list[Block] = []
    refusals: list[Refusal] = []
    numbers = np.zeros(int(flow.labels.fresh(1)[0]) + 1, dtype=np.int64)
    count = 1
    for signature, roots in families.items():
        members = [entries[e] for e, _ in signature]
        roles = {m.role for m in members}
        stuck = next((frozen[r] for r in roots if r in frozen), None)
        if "producer" not in roles or ("consumer" not in roles and stuck is None):
            continue
        if stuck is None and len(roots) < 2:
            many = max(count for _, count in signature) > 1
            stuck = Refusal(value=members[0].value, node="", op="", reason=TIED if many else ONE)
        if stuck is not None:
            made = [m.roots for m in members if m.role == "producer"]
            first = next(m for m in members if m.role == "producer")
            if first.value not in means:
                refusals.append(dataclasses.replace(cause(stuck, made, ties), value=first.value, position=None))
            continue
        roots.sort(key=lambda root: places.get(root, root))
        ids = np.arange(count, count + len(roots))
        numbers[roots] = ids
        count += len(roots)
        block = _block(np.array(roots), ids, members, order, nodes, kinds)
        rotation = next((ranked[root] for root in roots if root in ranked), block.ranked)
        blocks.append(dataclasses.replace(block, ranked=rotation))
    blocks.sort(key=lambda b: (b.span[1], b.span[0]))
    return Survey(
        blocks=_unique(blocks),
        refusals=tuple(dict.fromkeys([*refusals, *layers_inside(model, flow.facts)])),
        facts=flow.facts,
        marks=_final_marks(flow, numbers),
        operands=_operands(flow, params, numbers),
        ids=count,
    )


ATTENTION = ("heads", *INNER)  # units of several features
_Cut = list[tuple[int, bytes]]  # of one operand: axis, label class of every position as bytes


def _params(flow: Flow) -> dict[tuple[str, int], str]:
    """Return the key of the working array of each (node, operand).

    Operands with the same weight and the same labels share one array.  A weight that another node adds or multiplies
    per channel is cut there according to that node's channels and gets an array of its own.
    """
    cuts: dict[tuple[str, int], _Cut] = defaultdict(list)
    values: dict[tuple[str, int], str] = {}
    for use in _cuts(flow):
        values[use.node, use.operand] = use.value
        cuts[use.node, use.operand].append((use.mark.axes[0], _roots(flow, use.mark).tobytes()))
    ways = _ways(flow, ((values[where], cut) for where, cut in cuts.items()))
    clones: dict[str, int] = defaultdict(int, {name: 1 for name, _ in flow.weight_labels})
    weights = set(clones)
    names: dict[tuple[str, tuple[tuple[int, bytes], ...]], str] = {}
    found = {}
    for where, cut in cuts.items():
        value = values[where]
        if value in weights and all(ways[value, axis] == {roots} for axis, roots in cut):
            found[where] = value
            continue
        signature = (value, tuple(sorted(cut)))
        if signature not in names:
            names[signature] = value if not clones[value] else f"{value}#{clones[value]}"
            clones[value] += 1
        found[where] = names[signature]
    return found


def _cuts(flow: Flow) -> Iterable[Use]:
    """Return the first use of every axis of every operand; a consumer that makes queries has it twice, once in part."""
    found: dict[tuple[str, int, tuple[int, ...]], Use] = {}
    for use in flow.uses:
        found.setdefault((use.node, use.operand, use.mark.axes), use)
    return found.values()


def _ways(flow: Flow, cuts: Iterable[tuple[str, _Cut]]) -> dict[tuple[str, int], set[bytes]]:
    """Return the distinct labelings of each (constant, axis); for a weight's own axis, only its own labeling."""
    found: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    for value, cut in cuts:
        for axis, roots in cut:
            found[value, axis].add(roots)
    own = {place: {flow.labels.find(labels).tobytes()} for place, labels in flow.weight_labels.items()}
    return found | own


def _roots(flow: Flow, mark: Mark) -> Ints:
    """Return the label class of every position along the mark's axis; empty if all its axes were tied."""
    return flow.labels.find(mark.labels) if len(mark.axes) == 1 else np.zeros(0, dtype=np.int64)


def _entries(flow: Flow, params: dict[tuple[str, int], str]) -> list[_Entry]:
    gathered: dict[tuple[str, int, Role], list[Use]] = defaultdict(list)
    for use in flow.uses:
        if len(use.mark.axes) == 1:
            gathered[params[use.node, use.operand], use.mark.axes[0], use.role].append(use)
    found = []
    for (param, axis, role), uses in gathered.items():
        roots, first = _roots(flow, uses[0].mark), uses[0]
        met = roots if first.met is None else flow.labels.find(first.met)
        found.append(_Entry(param, first.value, axis, role, roots, met, tuple(uses)))
    return found


def _signatures(entries: list[_Entry]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return root -> members as (entry, number of positions); roots with equal signatures are interchangeable."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, entry in enumerate(entries):
        roots, counts = np.unique(entry.roots, return_counts=True)
        for root, positions in zip(roots.tolist(), counts.tolist(), strict=True):
            if root:
                found[root].append((number, positions))
    return {root: tuple(members) for root, members in sorted(found.items())}


def _kinds(flow: Flow) -> dict[int, set[Kind]]:
    found: dict[int, set[Kind]] = defaultdict(set)
    for labels, kind in flow.kinds:
        for root in np.unique(flow.labels.find(labels)).tolist():
            found[root].add(kind)
    return found


def _ranked(flow: Flow) -> dict[int, str]:
    """Return root -> name of the rotation inside heads that ranked its channels, in falling order of importance."""
    return {root: name for labels, name in flow.ranked for root in flow.labels.find(labels).tolist()}


def _kind(roots: Ints, kinds: dict[int, set[Kind]]) -> Kind:
    found = set().union(*(kinds.get(r, set()) for r in roots.tolist()))
    return next((k for k in ("heads", "vo", "qk", "stream", "rank", "conv") if k in found), "mlp")


def _block(
    roots: Ints,
    ids: Ints,
    members: list[_Entry],
    order: dict[str, int],
    nodes: dict[str, ir.Node],
    kinds: dict[int, set[Kind]],
) -> Block:
    kind = _kind(roots, kinds)
    probes: list[Probe] = []
    slots = []
    for entry in members:
        index = _index(entry.roots, roots)
        probe = _probe(entry, _index(entry.met, roots), kind, probes) if entry.role == "consumer" else None
        slots.append(
            Slot(param=entry.param, initializer=entry.value, axis=entry.axis, index=index, role=entry.role, probe=probe)
        )
    places = sorted({order[u.node] for e in members for u in e.uses})
    acting = [u.node for e in members if e.role != "passenger" for u in e.uses if not is_cached(nodes[u.node])]
    acting = sorted(set(acting), key=order.__getitem__)
    first = probes[0]
    marked = [nodes[u.node] for e in members if e.role != "producer" for u in e.uses]
    turned = (n.metadata_props for n in marked if INSIDE not in n.metadata_props)
    rotated = next((props[MARK] for props in turned if MARK in props), "")
    if rotated and not any(map(is_rotated, marked)):
        kind = "embedding"
    readers = (nodes[u.node].metadata_props for e in members if e.role == "consumer" for u in e.uses)
    rotated = rotated or next((props[LINEAR] for props in readers if LINEAR in props), "")
    return Block(
        name=f"{common_scope([nodes[n] for n in acting])}.{kind}".lstrip("."),
        kind=kind,
        units=len(roots),
        unit_size=1 if first.pooled else int(first.index.shape[1]),
        slots=tuple(slots),
        probes=tuple(probes),
        ids=ids,
        span=(places[0], places[-1]),
        nodes=tuple(scope(nodes[n]) for n in acting),
        ranked=rotated,
    )


def _index(found: Ints, roots: Ints) -> Ints:
    """Return the (u, m) positions of the units, in the order of `roots`."""
    positions = np.flatnonzero(np.isin(found, roots))
    by_unit = positions[np.argsort(found[positions], kind="stable")].reshape(len(roots), -1)
    return by_unit[np.argsort(np.argsort(roots))].astype(np.int64)


def _probe(entry: _Entry, index: Ints, kind: Kind, probes: list[Probe]) -> int:
    """Return the number of the probe that feeds a consumer; consumers of the same tensor share a probe."""
    sources = sorted({u.source for u in entry.uses if u.source is not None})
    inside = next((u.inside for u in entry.uses), ())
    value, axis = sources[0]
    also = tuple(v for v, _ in sources[1:])
    for number, probe in enumerate(probes):
        alike = (probe.value, probe.axis, probe.also, probe.inside) == (value, axis, also, inside)
        if alike and np.array_equal(probe.index, index):
            return number
    repeated = len(entry.met) > len(entry.roots)
    pooled = repeated or (index.shape[1] > 1 and kind not in ATTENTION and not inside)
    probes.append(Probe(value=value, axis=axis, index=index, pooled=pooled, also=also, inside=inside))
    return len(probes) - 1


def _unique(blocks: list[Block]) -> tuple[Block, ...]:
    """Return the blocks with unique names."""
    seen: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for block in blocks:
        total[block.name] += 1
    named = []
    for block in blocks:
        seen[block.name] += 1
        name = block.name if total[block.name] == 1 else f"{block.name}.{seen[block.name]}"
        named.append(dataclasses.replace(block, name=name))
    return tuple(named)


def _numbered(flow: Flow, mark: Mark, numbers: Ints) -> Ints:
    return numbers[flow.labels.find(mark.labels)]


def _final_marks(flow: Flow, numbers: Ints) -> dict[str, tuple[Mark, ...]]:
    found = {}
    for name, marks in flow.marks.items():
        final = [Mark(m.axes, _numbered(flow, m, numbers)) for m in marks if len(m.axes) == 1]
        final = [m for m in final if m.labels.any()]
        if final:
            found[name] = tuple(final)
    return found


def _operands(flow: Flow, params: dict[tuple[str, int], str], numbers: Ints) -> dict[tuple[str, int], Operand]:
    units: dict[tuple[str, int], dict[int, Ints]] = defaultdict(dict)
    values: dict[tuple[str, int], str] = {}
    scaled = {(use.node, use.operand) for use in flow.uses if use.scaled}
    for use in _cuts(flow):
        if len(use.mark.axes) == 1:
            found = _numbered(flow, use.mark, numbers)
            if found.any():
                units[use.node, use.operand][use.mark.axes[0]] = found
                values[use.node, use.operand] = use.value
    return {w: Operand(params[w], values[w], u, w in scaled) for w, u in units.items()}
