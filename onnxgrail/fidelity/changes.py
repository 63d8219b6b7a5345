"""Outputs that hardly differ from an input of the model: what it changes in them is judged.

An image that is enlarged or cleaned has nearly all of its energy from the input, and so have the next state of a
simulation and what an autoencoder makes of its input. A network that only copies would seem close to the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Array, Feed, Floats
from onnxgrail.fidelity.kinds.part import ALIKE, MANY
from onnxgrail.fidelity.sums import flat

CHANGED = 0.1  # largest share of the variance that the model changes, for these changes to be judged
COLORS = (1, 3, 4)  # channels of an image
SIDE, IMAGE = 8, 4  # least height and width, and the number of axes, of images
EQUAL = 1e-12  # least share of the variance that is a change

_Place = tuple[str, str, int, int]
"""An output, an input, the axis of the channels, and how much larger the output is."""


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """An input, enlarged to the size of an output, with a gain and an offset per channel.

    Attributes:
        name: of the input.
        axis: of the channels of an image, 1 or 3; 0 for other arrays, which have neither gain nor offset.
        times: factor of height and width.
        gain, offset: (channels,) how values of the input become those of the output.
        units: of the numbers of a sample, by how much each changes; None for images and large fields.
    """

    name: str
    axis: int
    times: int
    gain: Floats
    offset: Floats
    units: Floats | None = None

    def of(self, feed: Feed) -> Floats:
        """Return the input as the output would be if the model changed nothing, channels where the output has them."""
        shape = [1] * feed[self.name].ndim
        shape[self.axis] = len(self.gain)
        return _enlarged(feed[self.name], self.axis, self.times) * self.gain.reshape(shape) + self.offset.reshape(shape)


def bases_of(pairs: Iterable[tuple[Feed, Mapping[str, object]]]) -> dict[str, Base]:
    """Return, by output, the input that it resembles; none for one of which the model changes much.

    Args:
        pairs: feeds with their outputs.
    """
    sums: dict[_Place, Floats] = {}
    for number, (feed, outputs) in enumerate(pairs):
        here = {place: _moments(place, feed, outputs) for place in _places(feed, outputs)}
        same = [place for place in sums if place in here and here[place].shape == sums[place].shape]
        sums = {place: sums[place] + here[place] for place in same} if number else here
    found: dict[str, Base] = {}
    for place, moments in sums.items():
        if place[0] not in found and (base := _fitted(place, moments)) is not None:
            found[place[0]] = base
    return found


def may_resemble(feed: Feed, outputs: Mapping[str, object]) -> bool:
    """Return True if an output has the shape of an input, or of an image that is one enlarged."""
    return bool(_places(feed, outputs))


def _places(feed: Feed, outputs: Mapping[str, object]) -> list[_Place]:
    """Return the outputs that may resemble an input, by their shapes."""
    floats = {
        n: v for n, v in outputs.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f" and len(v.shape) > 1
    }
    found = []
    for output, value in floats.items():
        for name, given in feed.items():
            images = [(output, name, axis, _times(given, value, axis)) for axis in (1, 3) if value.ndim == IMAGE]
            same = given.shape == value.shape and given.dtype.kind == "f" and value.size > len(value)
            found += [place for place in images if place[-1]] or [(output, name, 0, 1)] * same
    return found


def _times(given: Array, output: Array, axis: int) -> int:
    """Return how much larger an output is than an input of the same channels; 0 if that is no image, or not known."""
    if given.ndim != 4 or given.dtype.kind not in "fu" or given.shape[axis] not in COLORS:
        return 0
    sides = [a for a in (1, 2, 3) if a != axis]
    times = output.shape[sides[0]] // max(given.shape[sides[0]], 1)
    wanted = [size * (times if a in sides else 1) for a, size in enumerate(given.shape)]
    return times if list(output.shape) == wanted and min(output.shape[a] for a in sides) >= SIDE else 0


def _moments(place: _Place, feed: Feed, outputs: Mapping[str, object]) -> Floats:
    """Return (6, channels) counts, sums and products of an input and an output; without an axis, each number is one."""
    output, name, axis, times = place
    both = (_enlarged(feed[name], axis, times), np.asarray(outputs[output], np.float64))
    x, y = (np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1) if axis else flat(one).T for one in both)
    products = [np.einsum("ij,ij->i", a, b) for a, b in ((x, x), (x, y), (y, y))]
    return np.stack([np.full(len(x), float(x.shape[1])), x.sum(axis=1), y.sum(axis=1), *products])


def _fitted(place: _Place, moments: Floats) -> Base | None:
    """Return the input with the gains and offsets of least error; None if they leave much of the variance."""
    count, x, y, xx, xy, yy = moments
    whole = yy - y * y / count
    if not place[2]:
        changed = yy - 2 * xy + xx
        shares = changed[whole > 0] / whole[whole > 0]
        if not len(shares) or not EQUAL < np.median(shares) < CHANGED:
            return None
        spread = np.sqrt(np.maximum(changed, 0) / count)
        units = np.maximum(spread, ALIKE * spread.max()) if len(spread) <= MANY else None
        return Base(*place[1:], np.ones(1), np.zeros(1), units)
    both = xy - x * y / count
    gain = both / np.maximum(xx - x * x / count, 1e-30)
    left = whole.sum() - (gain * both).sum()
    if not EQUAL * whole.sum() < left < CHANGED * whole.sum():
        return None
    return Base(*place[1:], gain, (y - gain * x) / count)


def _enlarged(given: Array, axis: int, times: int) -> Floats:
    values = given.astype(np.float64)
    if times == 1:
        return values
    from scipy.ndimage import zoom  # slow to import, and few models make images larger

    return np.asarray(
        zoom(values, [1 if a in (0, axis) else times for a in range(4)], order=1, mode="nearest", grid_mode=True)
    )
