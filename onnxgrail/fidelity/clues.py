"""Information about the outputs of a model from its inputs, and from all of its outputs together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxgrail.core import Array, Feed, Floats

STEERS = re.compile(r"(?<![a-z])(actions?|controls?|torques?|commands?)(?![a-z])")
STATES = re.compile(r"present|past|cache|state|hidden|memory|(?<![a-z])[hc][xn]?(?![a-z])")
SHORT = re.compile(r"^([hc])[nx]$")  # states of recurrent layers: hn is fed back as h or h0
SIDES = frozenset({"past", "present", "in", "out", "input", "output", "prev", "next", "new", "old", "n", "last"})
TOGETHER, ENOUGH = 0.5, 64  # least correlation of an output with an input, and numbers that show one


@dataclass(frozen=True, kw_only=True, slots=True)
class Clues:
    """Known facts about the inputs and outputs of a model.

    Attributes:
        ids: shape (B, S) of an input of token ids, None if there is none.
        predicts: True if the model predicts the next of these tokens, or if that is unknown.
        scores: name of the output that predicts them, in lower case; empty if none was found.
        fed: shapes of floating-point inputs, by name.
        synthetic: True if the inputs are random.
        lists: names of the outputs that are lists, as far as known; `Lists` adds to it.
        common: lengths of axes that several outputs have, such as the positions of scores and boxes.
        changes: by name of an output that is an input with small changes, units of its numbers, if they have any.
        detected: names of the outputs that have nothing but scores of detections; the comparer adds to it.
        steered: an input is an action.
        classes: number of classes that the labels of the data tell, 0 if they tell none.
        contents: by name of an output, what it holds as the user says it, one of `CONTENTS`.
        echoes: names in lower case of outputs that resemble an input, as those of autoencoders do.
    """

    ids: tuple[int, ...] | None = None
    predicts: bool = False
    scores: str = ""
    fed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    synthetic: bool = False
    lists: set[str] = field(default_factory=set)
    common: frozenset[int] = frozenset()
    changes: Mapping[str, Floats | None] = field(default_factory=dict)
    detected: set[str] = field(default_factory=set)
    classes: int = 0
    contents: Mapping[str, str] = field(default_factory=dict)
    echoes: frozenset[str] = frozenset()
    steered: bool = False

    def is_state(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if an output is fed back into the model: named as a state, and like an input of its shape.

        The next state after an action is what a model of the world is for.
        """
        if self.steered or not STATES.search(_lower(name)):
            return False
        return any(_alike(name, other) and _one_grows(shape, given) for other, given in self.fed.items())


def clues_of(feed: Feed, outputs: Feed, *, scores: str | None, known: bool, synthetic: bool) -> Clues:
    """Derive the clues from a feed.

    Args:
        feed: inputs by name.
        outputs: of the model, by name.
        scores: the output that predicts the next tokens, None if there is none.
        known: True if `scores` is the result of a check, False if it is unknown.
        synthetic: True if the feed is random.
    """
    ids = next((a.shape for a in feed.values() if a.ndim == 2 and a.dtype.kind in "iu" and a.shape[1] > 1), None)
    fed = {name: np.shape(a) for name, a in feed.items() if a.dtype.kind in "fV"}
    shapes = [array.shape[1:] for array in outputs.values() if isinstance(array, np.ndarray)]  # others are lists
    lengths = Counter(size for shape in shapes for size in set(shape))
    common = frozenset(size for size, count in lengths.items() if count > 1)
    return Clues(
        ids=ids,
        predicts=scores is not None or not known,
        scores=(scores or "").lower(),
        fed=fed,
        synthetic=synthetic,
        common=common,
        steered=any(STEERS.search(_lower(name)) for name in feed),
        echoes=frozenset(
            name.lower() for name, one in outputs.items() if any(_resembles(one, a) for a in feed.values())
        ),
    )


def _resembles(output: object, given: Array) -> bool:
    """Return True if an output and an input of its shape rise and fall together."""
    if not isinstance(output, np.ndarray) or output.shape != given.shape or output.size < ENOUGH:
        return False
    if output.dtype.kind != "f" or given.dtype.kind != "f":
        return False
    a, b = (side.ravel().astype(np.float64) for side in (output, given))
    known = np.isfinite(a).all() and np.isfinite(b).all()
    return bool(known and a.std() > 0 < b.std() and np.corrcoef(a, b)[0, 1] > TOGETHER)


def _lower(name: str) -> str:
    """Return a name in lower case with its words separated."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _alike(name: str, other: str) -> bool:
    """Return True if two names differ only in words that mark the side of the model, such as `past` and `present`."""
    mine, theirs = ({SHORT.sub(r"\1", w) for w in re.findall(r"[a-z]+|\d+", _lower(n))} - SIDES for n in (name, other))
    numbers = [{word for word in words if word.isdigit()} for words in (mine, theirs)]
    return bool((mine & theirs) - numbers[0]) and (numbers[0] == numbers[1] or not all(numbers))


def _one_grows(shape: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Return True if shapes are equal except for the number of samples and one axis along which a cache grows."""
    return len(shape) == len(given) and sum(a != b for a, b in zip(shape[1:], given[1:], strict=True)) <= 1
