"""A run of the model with all intermediate tensors as outputs, which provides the facts for tracing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.feeds.signature import Signature, is_whole, signature_of
from onnxgrail.calibration.runtime.session import CPU, Setup, open_session
from onnxgrail.calibration.stream.relay import SHORT, STRETCH, Relay
from onnxgrail.core import Array, Feed, Ints
from onnxgrail.errors import ModelError
from onnxgrail.graph.attributes import written
from onnxgrail.graph.io.mapped import Mapped
from onnxgrail.graph.io.running.widen import has_bfloat16, true_types
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.stored.find import below_a_byte, is_dequantised, stored
from onnxgrail.graph.trace.facts import Facts, constants, grid_of, indices

HEAVY = 2**20  # bytes of an external weight whose computed constants are not stored
LARGE = 2**21  # bytes of a feed, such as large images: the tensors of a convolutional network take a hundred times that
SMALL = 4096
FEW = 8  # real feeds of which one may have other sizes


def observe(
    model: ir.Model,
    feed: Feed,
    *,
    providers: Sequence[str] = CPU,
    known: frozenset[str] | None = None,
    others: Sequence[Callable[[], Feed]] = (),
) -> Facts:
    """Run the model once on `feed` and on feeds of other sizes.

    A deep model is run in stretches, so that the tensors of all layers are never in memory together; so is a model
    with large inputs.

    Args:
        model: the graph.
        feed: its inputs.
        providers: execution providers.
        known: names that may count as constants; None for all that depend only on constants.
        others: make real feeds, for open sizes that cannot be changed in `feed`: indices may name what a part of it
            lacks, as the edges of a graph name its nodes.

    Raises:
        ModelError: ONNX Runtime cannot load or run the model.
    """
    stretch = SHORT if sum(array.nbytes for array in feed.values()) > LARGE else STRETCH
    if len(model.graph) > stretch:
        try:
            return _observed(model, feed, stretch, providers, known, others)
        except ModelError:  # a run of the whole model decides if only the split failed
            pass
    return _observed(model, feed, len(model.graph), providers, known, others)


def _observed(
    model: ir.Model,
    feed: Feed,
    stretch: int,
    providers: Sequence[str],
    known: frozenset[str] | None,
    others: Sequence[Callable[[], Feed]],
) -> Facts:
    """Return the facts of a model that is run in stretches of `stretch` nodes."""
    known = constants(model) if known is None else constants(model) & known
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, np.dtype] = {}
    values: dict[str, Array] = {}
    grids: dict[str, tuple[Ints, ...]] = {}
    hidden, numbering, signature = below_a_byte(model), indices(model), signature_of(model)
    nodes = [n for n in model.graph if not (is_dequantised(n) and n.outputs[0].name in known)]  # weights stay integers
    names = [v.name for node in nodes for v in node.outputs if v.name and v.name not in hidden]
    later = heavy(model, known & set(names))
    names = [name for name in names if name not in set(later)]
    with Relay(model, names, known, stretch=stretch, providers=providers) as relay:
        for found in chain([feed], relay.run(feed)):
            for name, array in found.items():
                if isinstance(array, np.ndarray):
                    shapes[name], dtypes[name] = array.shape, array.dtype
                    if name in known or (array.dtype.kind in "iub" and array.size <= SMALL):
                        values[name] = array
                    if name in numbering:
                        grids[name] = grid_of(array)
        other, sizes = _elsewhere(relay, other_sizes(feed, signature))
        real, more = _elsewhere(relay, _of_other_sizes(others, feed, signature, sizes))
    for name in later:
        array = compute(model, name)
        shapes[name], dtypes[name] = array.shape, array.dtype
    _narrow_types(model, known, dtypes, values)
    for name, tensor in _tensors(model):
        shapes[name], dtypes[name] = tuple(tensor.shape.numpy()), tensor.dtype.numpy()
        if tensor.size <= SMALL or name in hidden:
            values[name] = tensor.numpy()
        if name in numbering:
            grids[name] = grid_of(tensor.numpy())
    weights = stored(model, known, shapes)
    shapes.update({name: weight.shape for name, weight in weights.items()})
    dtypes.update({name: weight.dtype for name, weight in weights.items()})
    return Facts(
        shapes=shapes,
        dtypes=dtypes,
        values=Values(values, model, {name: dtypes[name] for name in later}) if later else values,
        constants=known,
        varying=_varying((sizes, more), shapes),
        other=real if other is None else other,
        stored=weights,
        grids=grids,
    )


def _narrow_types(
    model: ir.Model, known: Collection[str], dtypes: dict[str, np.dtype], values: dict[str, Array]
) -> None:
    """Restore the file's dtype of constants that ran as wider floats, because rewriting needs it."""
    for name, kind in (true_types(model) if has_bfloat16(model) else {}).items():
        if name in known and name in dtypes:
            dtypes[name] = kind
            if name in values:
                values[name] = values[name].astype(kind)


def _tensors(model: ir.Model) -> list[tuple[str, ir.TensorProtocol]]:
    """Return initializers and the values of Constant nodes."""
    found = [(name, v.const_value) for name, v in model.graph.initializers.items()]
    found += [(node.outputs[0].name or "", written(node)) for node in model.graph if node.outputs]
    return [(name, tensor) for name, tensor in found if tensor is not None]


def probe_feed(feed: Feed, signature: Signature) -> dict[str, Array]:
    """Return a small feed for tracing: two samples if the batch is open, which reveals heads merged with the batch."""
    arrays = {entry.name: feed[entry.name] for entry in signature if entry.name in feed}
    batches = {a.shape[0] for a in arrays.values() if a.ndim}
    fixed = any(entry.shape and isinstance(entry.shape[0], int) for entry in signature)
    if fixed or len(batches) != 1 or not all(a.ndim for a in arrays.values()) or is_whole(arrays, signature):
        return dict(arrays)
    if batches == {1}:
        return {name: np.concatenate([a, a]) for name, a in arrays.items()}
    return {name: a[:2] for name, a in arrays.items()}


def other_sizes(feed: Feed, signature: Signature) -> list[dict[str, Array]]:
    """Return feeds of other sizes, which reveal sizes that depend on the input.

    First one sample less and every open axis shorter too (axes with the same symbol stay equal), then one sample less,
    then twice the samples.  The model may reject any of them.
    """
    batch = max((a.shape[0] for a in feed.values() if a.ndim), default=1)
    declared = {entry.name: entry.shape for entry in signature}
    found = []
    for everywhere in (True, False):
        candidate = dict(feed)
        for name, array in feed.items():
            dims = declared.get(name) or (None,) * array.ndim
            cuts = [
                slice(0, size - 1)
                if size > 1 and ((axis == 0 and size == batch) or (axis > 0 and everywhere and isinstance(dim, str)))
                else slice(None)
                for axis, (size, dim) in enumerate(zip(array.shape, dims, strict=True))
            ]
            candidate[name] = np.ascontiguousarray(array[tuple(cuts)]).reshape(array[tuple(cuts)].shape)
        if any(candidate[n].shape != feed[n].shape for n in feed):
            found.append(candidate)
    return [*found, {n: np.concatenate([a, a]) if a.ndim and a.shape[0] == batch else a for n, a in feed.items()}]


def _of_other_sizes(
    makers: Sequence[Callable[[], Feed]], feed: Feed, signature: Signature, sizes: Mapping[str, tuple[int, ...]]
) -> Iterator[Feed]:
    """Yield real feeds with other shapes than `feed`, unless each open axis has another size in `sizes` already."""
    axes = {(e.name, axis) for e in signature for axis, size in enumerate(e.shape or ()) if not isinstance(size, int)}
    if all(name in sizes and sizes[name][axis] != feed[name].shape[axis] for name, axis in axes):
        return
    for other in (make() for make in makers[:FEW]):
        if any(other[name].shape != array.shape for name, array in feed.items()):
            yield other


def _elsewhere(relay: Relay, feeds: Iterable[Feed]) -> tuple[Feed | None, Mapping[str, tuple[int, ...]]]:
    """Return the first feed that the model accepts, and the shapes it gives; None and {} if all sizes are fixed."""
    for feed in feeds:
        try:
            arrays = [item for found in chain([feed], relay.run(feed)) for item in found.items()]
            return feed, {name: a.shape for name, a in arrays if isinstance(a, np.ndarray)}  # a sequence has no shape
        except ModelError:  # fixed sizes are not an error here
            continue
    return None, {}


def _varying(
    found: Iterable[Mapping[str, tuple[int, ...]]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, frozenset[int]]:
    """Return the axes whose size is another one in some run."""
    axes: dict[str, frozenset[int]] = {}
    for name, shape in chain.from_iterable(run.items() for run in found):
        changed = {k for k, (a, b) in enumerate(zip(shape, shapes.get(name, ()), strict=False)) if a != b}
        if changed:
            axes[name] = axes.get(name, frozenset()) | changed
    return axes


class Values(Mapping[str, Array]):
    """Known values by name: stored values, and values computed on each access."""

    def __init__(self, kept: Mapping[str, Array], model: ir.Model, types: Mapping[str, np.dtype]) -> None:
        self._kept, self._model, self._types = kept, model, types

    def __getitem__(self, name: str) -> Array:
        """Return the value."""
        if name in self._kept:
            return self._kept[name]
        kind = self._types[name]  # raises KeyError before anything is computed
        return compute(self._model, name).astype(kind, copy=False)

    def __contains__(self, name: object) -> bool:
        """Return True if the value is known; compute nothing."""
        return name in self._kept or name in self._types

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names."""
        yield from self._kept
        yield from self._types

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._kept) + len(self._types)


def heavy(model: ir.Model, constants: Collection[str]) -> list[str]:
    """Return the computed constants that depend on a large external weight, in graph order.

    Nodes that also read a model input cannot be computed from weights alone, such as a CastLike that borrows a type.
    """
    found = {
        name
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, Mapped) and value.const_value.nbytes >= HEAVY
    }
    fed = {v.name for v in model.graph.inputs} - set(model.graph.initializers)
    names: list[str] = []
    for node in model.graph if found else ():
        read, made = {v.name for v in node.inputs if v is not None}, [v.name for v in node.outputs if v.name]
        if read & fed:
            fed.update(made)
        elif read & found:
            names += [name for name in made if name in constants]
            found.update(made)
    return names


def compute(model: ir.Model, name: str) -> Array:
    """Return the value of a computed constant."""
    graph = ir.convenience.extract(model.graph, [], [name])
    graph.opset_imports.update(model.opset_imports)
    piece = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    with open_session(to_bytes(piece), Setup.as_is()) as session:
        return session.run({})[name]
