"""Images that hardly differ from an input of the model: what it changes in them is judged.

An image that is enlarged or cleaned has nearly all of its energy from the input. A network that only copies would seem
close to the original.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Array, Feed, Floats

CHANGED = 0.1  # largest share of an image's variance that the model changes, for these changes to be judged
COLORS = (1, 3, 4)  # channels of an image
SIDE = 8  # least height and width


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """An input, enlarged to the size of an output, with a gain and an offset per channel.

    Attributes:
        name: of the input.
        axis: of the channels, 1 or 3.
        times: factor of height and width.
        gain, offset: (channels,) how values of the input become those of the output.
    """

    name: str
    axis: int
    times: int
    gain: Floats
    offset: Floats

    def of(self, feed: Feed) -> Floats:
        """Return the input as the output would be if the model changed nothing, channels where the output has them."""
        shape = [1] * 4
        shape[self.axis] = len(self.gain)
        return _enlarged(feed[self.name], self.axis, self.times) * self.gain.reshape(shape) + self.offset.reshape(shape)


def base_of(output: object, feed: Feed) -> Base | None:
    """Return the input that an output resembles; None if the output is no image, or the model changes much of it."""
    if not isinstance(output, np.ndarray) or output.ndim != 4 or output.dtype.kind != "f":
        return None
    for name, given in feed.items():
        for axis in (1, 3):
            times = _times(given, output, axis)
            if times and (found := _fitted(name, output.astype(np.float64), feed, axis, times)) is not None:
                return found
    return None


def _times(given: Array, output: Array, axis: int) -> int:
    """Return how much larger an output is than an input of the same channels; 0 if that is no image, or not known."""
    if given.ndim != 4 or given.dtype.kind not in "fu" or given.shape[axis] not in COLORS:
        return 0
    sides = [a for a in (1, 2, 3) if a != axis]
    times = output.shape[sides[0]] // max(given.shape[sides[0]], 1)
    wanted = [size * (times if a in sides else 1) for a, size in enumerate(given.shape)]
    return times if list(output.shape) == wanted and min(output.shape[a] for a in sides) >= SIDE else 0


def _fitted(name: str, output: Floats, feed: Feed, axis: int, times: int) -> Base | None:
    """Return the input with the gains and offsets of least error; None if they leave much of the variance."""
    x, y = (
        np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1) for one in (_enlarged(feed[name], axis, times), output)
    )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    middle, goal = (one - one.mean(axis=1, keepdims=True) for one in (x, y))
    gain = np.einsum("ij,ij->i", middle, goal) / np.maximum(np.einsum("ij,ij->i", middle, middle), 1e-30)
    left = np.square(goal - gain[:, None] * middle).sum()
    if not 0 < left < CHANGED * np.square(goal).sum():
        return None
    return Base(name, axis, times, gain, y.mean(axis=1) - gain * x.mean(axis=1))


def _enlarged(given: Array, axis: int, times: int) -> Floats:
    values = given.astype(np.float64)
    if times == 1:
        return values
    from scipy.ndimage import zoom  # slow to import, and few models make images larger

    return np.asarray(
        zoom(values, [1 if a in (0, axis) else times for a in range(4)], order=1, mode="nearest", grid_mode=True)
    )
