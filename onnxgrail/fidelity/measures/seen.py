"""One output in one batch of samples, cut into its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxgrail.core import Array, Bools, Floats
from onnxgrail.fidelity.kinds.part import FEW, SLACK, Part
from onnxgrail.fidelity.kinds.read import columns_of
from onnxgrail.fidelity.lists import LISTED
from onnxgrail.fidelity.measures.measure import Batch
from onnxgrail.fidelity.measures.scores import active
from onnxgrail.fidelity.measures.sparse import sparse
from onnxgrail.fidelity.sums import BLOCK, PER_SAMPLE, Distances, usable, widened

MAP = 4  # axes of maps, channels first
DISTANT = frozenset({"tokens", "labels"})  # kinds whose measure needs only distances
SQUARED = frozenset({"values", "state"})  # kinds whose error and energy are among the distances


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seen:
    """One output in one batch.

    Attributes:
        brief: see `Tally`.
        base: the input that the output resembles, as large as that; None if there is none.
        whole: parts of the output that are a single block of samples, once they were cut out.
        masks: results of `active`; ranges: of `probable`.
    """

    wanted: Array
    got: Array
    far: Distances
    mask: Bools | None
    brief: bool
    base: Floats | None = None
    whole: dict[Part, Batch] = field(default_factory=dict)
    masks: dict[Part, Bools] = field(default_factory=dict)
    ranges: dict[Part, bool] = field(default_factory=dict)

    def blocks(self, part: Part, read: Bools | None = None) -> Iterator[Batch]:
        """Yield the part of the output, a block of samples at a time.

        Args:
            part: its content.
            read: mask of positions with a score that is read; it has the axes of the output.
        """
        if part in self.whole:
            yield replace(self.whole[part], read=read)
            return
        count = len(self.wanted)
        mask = self.mask if self.mask is not None and self.wanted.shape[:2] == self.mask.shape else None
        plain = part.columns is None and part.center is None and not part.changes and read is None
        if part.kind in DISTANT or (self.brief and part.kind in SQUARED and plain):
            nothing = np.zeros((count, 0))
            yield Batch(part=part, a=nothing, b=nothing, shown=mask, distances=self.far, brief=self.brief)
            return
        sides, each = sparse(part, self.wanted, self.got) if self.brief else ((self.wanted, self.got), 1.0)
        step = max(1, BLOCK * count // max(sides[0].size, 1))
        for start in range(0, count, step):
            cut = slice(start, start + step)
            shown = None if mask is None else mask[cut]
            a, b = usable(*(columns_of(side[cut], part) for side in sides))
            if part.changes and self.base is not None:
                a, b = a - self.base[cut], b - self.base[cut]
            if shown is not None:
                a, b = (np.where(widened(shown, a.ndim), side, 0.0) for side in (a, b))
            far = replace(self.far, **{name: getattr(self.far, name)[cut] for name in PER_SAMPLE})
            some = None if read is None else read[cut]
            batch = Batch(part=part, a=a, b=b, shown=shown, distances=far, read=some, brief=self.brief, each=each)
            if step >= count:
                self.whole[part] = batch
            yield batch

    def active(self, part: Part) -> Bools:
        """Return the mask (n, positions) of positions with a score that is read."""
        if part not in self.masks:
            self.masks[part] = np.concatenate([active(part, batch.a, batch.b) for batch in self.blocks(part)])
        return self.masks[part]

    def probable(self, part: Part) -> bool:
        """Return True if all values of the reference can be probabilities."""
        if part not in self.ranges:
            whole = _in_range(self.wanted)
            self.ranges[part] = whole or all(_in_range(batch.a) for batch in self.blocks(part))
        return self.ranges[part]

    def read(self, part: Part, positions: Mapping[tuple[int, ...], Bools]) -> Bools | None:
        """Return the mask of positions whose score is read, with the axes of the output; None if there are no scores.

        Args:
            part: of the output.
            positions: masks by their shape (n, positions).
        """
        shape = self.wanted.shape
        listed = part.why == LISTED and part.axis is None  # as long as another output by chance only
        if part.kind == "values" and len(shape) == MAP and shape[1] <= FEW:
            mask = positions.get((shape[0], *shape[2:]))
            return None if mask is None else np.expand_dims(mask, 1)
        if part.kind != "values" or len(shape) != 3 or listed:
            return None
        for axis in (1, 2) if part.axis is None else (3 - part.axis,):
            mask = positions.get((shape[0], shape[axis]))
            if mask is not None and (shape[axis] > 1 or part.axis is not None):
                return np.expand_dims(mask, 3 - axis)
        return None


def _in_range(values: Array) -> bool:
    """Return True if all values can be probabilities."""
    return not values.size or bool(values.min() >= -SLACK and values.max() <= 1 + SLACK)
