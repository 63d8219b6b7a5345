"""Frozen data classes that graph code and numeric code exchange.

Letters, used with one meaning everywhere: u units of a block, m members of one unit along one axis, h = u*m width,
k kept units, r all other axes of a weight, n samples (rows).  A *unit* is kept or removed as a whole: a channel, a
neuron of a gated pair, a head, a key-value group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from onnxgrail.options import INNER as INNER  # noqa: PLC0414
from onnxgrail.options import KINDS as KINDS  # noqa: PLC0414  this module hands out all names that rooms exchange
from onnxgrail.options import Kind as Kind  # noqa: PLC0414
from onnxgrail.options import Recipe as Recipe  # noqa: PLC0414

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Feed = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Labels:
    """The target classes of samples: integers, with the sample axis first.

    `classes` is the number of classes, None if the data do not give it; `highest` is the largest class of all samples
    of the data, None if only these are known.
    """

    values: Array
    classes: int | None = None
    highest: int | None = None


Role = Literal["producer", "passenger", "consumer"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """The positions of a block's channels along one axis of one weight.

    Attributes:
        param: key of the working array; differs from `initializer` only if a shared constant is cloned.
        initializer: name of the value in the original model.
        axis: axis of the array, not negative.
        index: (u, m) positions in the original axis.
        role: a *producer* computes the channels, a *consumer* contracts them, a *passenger* (bias, scale) acts per
            channel.
        probe: for a consumer, the number of the block's probe that feeds it.
    """

    param: str
    initializer: str
    axis: int
    index: Ints
    role: Role
    probe: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """An activation whose second moments a block needs: the input of one or more consumers.

    Attributes:
        value: name of the tensor.
        axis: its channel axis.
        index: (u, m) positions in that axis.
        pooled: the m positions are samples of one u-vector (a flattened feature map); otherwise they are features of
            one u*m-vector (heads).
        also: more tensors whose rows are added to the sums.
        alone: only the squares of channels are needed, not the products of two channels.
        few: there are few rows: they are kept, instead of the products of two channels; then `alone` is True too.
        inside: for an activation inside a fused node: the name of that node and its inputs other than `value`.
    """

    value: str
    axis: int
    index: Ints
    pooled: bool
    also: tuple[str, ...] = ()
    alone: bool = False
    few: bool = False
    inside: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return the side length of this probe's Gram matrix."""
        return int(self.index.shape[0] if self.pooled else self.index.size)

    @property
    def numbers(self) -> int:
        """Return the number of second moments that are needed."""
        return self.width if self.alone else self.width**2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """A set of interchangeable units with everything that must be narrowed together.

    Attributes:
        name: readable and unique in the model.
        kind: `conv`, `mlp`, `heads`, `qk`, `vo`, `stream` or `embedding`.
        units: u.
        unit_size: features of one unit as its consumers see it: head size times query heads for heads, the number of
            heads for `qk` and `vo`, else 1.
        slots: all weights touched; probes: one per distinct consumer input.
        ids: (u,) global unit numbers used by the tracer's marks.
        span: positions in node order of the first and the last node that holds one of the slots.
        nodes: names of the nodes that hold producers and consumers, for `--include/--exclude` and the report.
        ranked: name of the rotation that left the units in falling order of importance; '' if there was none.
    """

    name: str
    kind: Kind
    units: int
    unit_size: int
    slots: tuple[Slot, ...]
    probes: tuple[Probe, ...]
    ids: Ints
    span: tuple[int, int]
    nodes: tuple[str, ...]
    ranked: str = ""

    @property
    def producers(self) -> tuple[Slot, ...]:
        """Return the slots whose weights compute the channels."""
        return tuple(s for s in self.slots if s.role == "producer")

    @property
    def consumers(self) -> tuple[Slot, ...]:
        """Return the slots whose weights contract the channels."""
        return tuple(s for s in self.slots if s.role == "consumer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Channels that are not narrowed, with the node that prevents it and the reason.

    `position` is that node's place in node order; None until a report looks it up.
    """

    value: str
    node: str
    op: str
    reason: str
    position: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stats:
    """Sums over calibration rows of one probe: gram (h, h) = sum x xT, total (h,) = sum x, count = rows.

    If the probe is `alone`, gram is the diagonal only, (h,); if its rows are few, `rows` are the x (n, h) themselves.
    Products of wide probes may be float32, like rows.
    """

    gram: Floats
    total: Floats
    count: int
    rows: Array | None = None

    @property
    def squares(self) -> Floats:
        """Return (h,) sum x * x; rounding can make the value of a dead channel negative."""
        return self.gram if self.gram.ndim == 1 else np.diagonal(self.gram)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class View:
    """The weights and statistics of a block that numeric code works on.

    Attributes:
        block: the block.
        weights: one (u, m, r) float64 array per slot, in the order of `block.slots`, with the current values.
        stats: one per probe, in the order of `block.probes`; empty if no method needs data.
        gradient: (u,) Σ |W| · g over the unit's consumer weights, g being the root mean square gradient of the norm of
            the region's output, per sample and divided by the root of the rows per sample; None if not needed.
        kept: number of units that stay, so that a selector need not order them; None if it is not known yet.
    """

    block: Block
    weights: Sequence[Floats]
    stats: tuple[Stats, ...]
    gradient: Floats | None = None
    kept: int | None = None

    def of(self, role: Role) -> list[tuple[Slot, Floats]]:
        """Return the slots of a role with their weights."""
        return [(slot, self.weights[number]) for number, slot in enumerate(self.block.slots) if slot.role == role]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reducer:
    """A map from u units to k: a selection, or an average over clusters.

    Attributes:
        kept: (k,) ascending indices of the kept units; for folding, the representative (first member) of each cluster.
        cluster: (u,) cluster of each unit for folding, numbered like `kept`; None for pruning.
    """

    kept: Ints
    cluster: Ints | None = None


Status = Literal["ok", "damped", "plain", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The numerical result of one block.

    ok: as requested; damped: a larger ridge was needed; plain: narrowed, but the compensation would not have helped and
    the uncompensated weights stay; skipped: the block was not changed.  `clamped` counts the values beyond the range of
    the weight's format.
    """

    status: Status = "ok"
    reason: str = ""
    clamped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockError:
    """Relative squared errors of the consumers' outputs on calibration rows: without and with compensation."""

    plain: float | None = None
    compensated: float | None = None
    validation: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """The decision for one block: which units stay and the new weights at the kept positions.

    Attributes:
        reducer: the units that stay.
        selector: name of the selector that scored the units; empty if none did.
        weights: (slot number, new (k, m, r) values) for the slots whose values change in addition to being sliced.
        outcome, error: for the report.
    """

    block: Block
    reducer: Reducer
    selector: str = ""
    weights: tuple[tuple[int, Floats], ...] = ()
    outcome: Outcome = field(default_factory=Outcome)
    error: BlockError = field(default_factory=BlockError)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Applied:
    """The changes that a method made to the narrowed graph.

    Attributes:
        entry: for the report, under the method's name.
        refusals: the parts that the method did not change, with reasons.
        macs, bytes: reduction compared with the narrowed model: multiply-accumulates on the probe feed, bytes of
            weights.  Negative if the method added some.
        notes: messages for the user.
    """

    entry: Mapping[str, Any]
    refusals: tuple[Refusal, ...] = ()
    macs: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A form of rounded weights.

    Attributes:
        bits: 4 or 8.
        size: inputs that share a scale.
        symmetric: zero points are in the middle of the codes and are not stored.
        dtype: of the scales.
    """

    bits: int
    size: int
    symmetric: bool = False
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))

    @property
    def high(self) -> int:
        """Return the largest code."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """Return the zero point of a symmetric grid."""
        return int(2 ** (self.bits - 1))

    def blocks(self, inputs: int) -> int:
        """Return the number of blocks of a matrix."""
        return -(-inputs // self.size)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A matrix on a grid: (code - zero) * scale.

    Attributes:
        codes: (inputs, outputs).
        scale: (blocks, outputs), numbers of the dtype of the grid.
        zero: (blocks, outputs), codes that stand for 0.
        grid: the form.
    """

    codes: Array
    scale: Array
    zero: Array
    grid: Grid

    def values(self, dtype: npt.DTypeLike = np.float64) -> Array:
        """Return the numbers (inputs, outputs), computed block by block, so that they take no more memory than that."""
        found, scale = np.empty(self.codes.shape, dtype), self.scale.astype(np.float64)
        for number, first in enumerate(range(0, len(found), self.grid.size)):
            rows = slice(first, first + self.grid.size)
            found[rows] = (self.codes[rows].astype(np.float64) - self.zero[number]) * scale[number]
        return found


Selector = Callable[[View, np.random.Generator], Floats]
"""Return scores (u,) of a block's units; units with high scores stay.  `needs_data`: `view.stats` is read."""
