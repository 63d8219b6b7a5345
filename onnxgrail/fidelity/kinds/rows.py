"""Rules for outputs with one row of numbers, or one number, per sample."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.kinds.part import (
    ACTIONS,
    ACTIVE,
    BOX,
    COMMON,
    FEATURES,
    FEW,
    LOUD,
    OFTEN,
    SCORES,
    SLACK,
    SURELY,
    Look,
    Part,
    Rule,
    between,
    centered,
    in_unit,
    probabilities,
    values,
    vary_alone,
)

SHARP = 0.2  # least mean of the highest probability for many columns to count as class scores
FLAT = 0.1  # share of the way from equal probabilities to a certain class below which a softmax is flat
MEAN = 0.5  # share of the mean over samples in the energy from which on a row is no embedding
ALIKE = 0.001  # least standard deviation of a column, as a share of the largest one
WIDTH = 16  # the number of columns of an embedding is a multiple of this, that of class scores hardly ever
VAST = 30.0  # spread of a row from which on it holds no scores at all
VISIBLE = 0.001  # least standard deviation of chances that differ
RARELY = 0.05  # largest share of samples with a score above 0.1, for chances that stay low
NARROW = 0.1  # standard deviation of chances, all near each other, up to which an error of 1 % would hide their order
PAIR = 2  # columns of an event and its complement
OWN = "that vary on their own"
PATTERN = 0.1  # most variance between samples, as a share of the total, for one common pattern


def _features(look: Look) -> tuple[Part, ...]:
    columns, lengths = look.rows.shape[1], np.linalg.norm(look.rows, axis=1)
    named = bool(FEATURES.search(look.words)) and columns > 1
    if not named and (columns <= BOX or not np.allclose(lengths, 1.0, atol=SLACK)):
        return ()
    why = "named as features" if named else "rows of length 1"
    if centered(look, MEAN) is not None:  # all directions are near each other
        return (differing(look, f"{why}, around a common mean"),)
    return (Part(kind="embedding", why=why),)


def _row_in_range(look: Look) -> tuple[Part, ...]:
    if not in_unit(look.array) or (look.rows.shape[1] > FEW and between(look.array) and _pattern(look)):
        return ()
    kind = "classes" if look.rows.shape[1] == 1 else "scores"
    return (Part(kind=kind, why="in 0..1", form="probabilities"),)


def with_numbers(look: Look, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Add the numbers themselves to chances that decide nothing, such as risks or click rates: their order counts."""
    chances = len(parts) == 1 and parts[0].kind in ("classes", "scores") and look.telling
    if not chances or not _undecided(probabilities(look.rows, parts[0].form), parts[0].kind):
        return parts
    return (*parts, differing(look, "chances that decide little"))


def _undecided(chances: Floats, kind: str) -> bool:
    """Return True for chances (samples, columns) that are near each other, or for those of events that stay low."""
    columns = chances.shape[1]
    if kind == "scores":
        near = between(chances) and chances.std(axis=0).max() < NARROW
        low = np.mean(chances.max(axis=1) > ACTIVE) < RARELY and chances.std(axis=0).max() > VISIBLE
        return bool(columns <= FEW and (near or low))
    if columns > PAIR:
        best = np.partition(chances, -2, axis=1)[:, -2:]
        return bool(np.diff(best).mean() < NARROW)
    event = chances[:, -1]
    sides, spread = np.unique(event >= OFTEN), event.std()
    return bool(spread < NARROW if len(sides) > 1 else spread > max(VISIBLE, NARROW * event.mean()))


def _one_number(look: Look) -> tuple[Part, ...]:
    if look.rows.shape[1] > 1:
        return ()
    if SCORES.search(look.words) and look.array.min() <= 0:  # logits are below 0, too, ratings are not
        return (Part(kind="classes", why="named as a score", form="binary"), *_ratings(look))
    return (differing(look, "one number"),)


def _ratings(look: Look) -> tuple[Part, ...]:
    """Return numbers that are named as scores, but hardly ever below 0, as a grade of 0 to 5 is that is learned."""
    rare = look.telling and 0 < np.mean(look.rows < 0) < RARELY
    return (differing(look, "named as scores, hardly ever below 0"),) if rare else ()


def _pattern(look: Look) -> tuple[Part, ...]:
    """Detect rows that hardly differ from their mean, such as points of a face; class scores differ."""
    rows = look.rows
    if not look.telling or SCORES.search(look.words):
        return ()
    inside = np.square(rows - rows.mean(axis=0)).sum()
    if len(np.unique(rows.argmax(axis=1))) > 1 and inside >= PATTERN * np.square(rows - rows.mean()).sum():
        return ()
    return (differing(look, "the same pattern in all samples"),)


def differing(look: Look, why: str) -> Part:
    """Return a part with values whose mean over the samples says nothing, such as ages or ratings.

    It is not subtracted if the samples are few or random, or if the values hardly differ from it.  A few columns each
    count by their own standard deviation: one may be an age or a length, another a probability or an angle.
    """
    mean, spread = centered(look), look.array.std(axis=0)
    units = np.maximum(spread, ALIKE * spread.max()) if mean is not None and look.rows.shape[1] <= FEW else None
    return Part(kind="values", why=why, center=mean, units=units)


def _positive(look: Look) -> tuple[Part, ...]:
    """Detect rows of numbers above 0, such as ratings: of logits some are below, since their mean stays near 0.

    Many numbers of which some are 0 are what a ReLU leaves; scores of a few classes may be that, too.
    """
    least = look.array.min()
    if look.rows.shape[1] <= FEW:
        return (differing(look, "a few numbers, all above 0"),) if least > 0 else ()
    if least < 0 or SCORES.search(look.words):
        return ()
    if least > 0 and centered(look, COMMON) is not None:  # such as temperatures: all directions are near each other
        return (differing(look, "many numbers, all above 0, around a common mean"),)
    return (Part(kind="embedding", why="one row of many numbers, none below 0"),)


def _echo(look: Look) -> tuple[Part, ...]:
    """Detect what an autoencoder makes of an input."""
    return (differing(look, "resembles an input"),) if look.words in look.clues.echoes else ()


def _class_row(look: Look) -> tuple[Part, ...]:
    named, columns = bool(SCORES.search(look.words)), look.rows.shape[1]
    few, equal = columns <= FEW, 1 / columns
    least = equal + FLAT * (1 - equal) if few else SHARP
    spread = np.median(look.rows.std(axis=1))
    if named or ((few or spread <= LOUD) and probabilities(look.rows, "logits").max(axis=1).mean() >= least):
        why = "named as scores" if named else "one row of scores"
        classes = Part(kind="classes", why=why, form="logits", axis=1, rows=True)
        alone = vary_alone(look, look.rows)
        if named:
            labels = Part(kind="scores", why=f"{why} {OWN}", form="binary")
            return (classes, labels, *_ratings(look)) if alone else (classes,)
        if ACTIONS.search(look.words):  # a joint's torque is no score, but an action may be a choice
            return (differing(look, "named as actions"), classes)
        numbers = differing(look, f"numbers {OWN}")
        return ((numbers,) if columns <= SURELY or spread > LOUD else (numbers, classes)) if alone else (classes,)
    if few:
        why = "a few numbers, and no class stands out"
        return (differing(look, why) if vary_alone(look, look.rows) else values(look, why),)
    vector = Part(kind="embedding", why="one row of many numbers, no class stands out")
    if centered(look, MEAN) is not None:
        vector = differing(look, "one row of many numbers around a common mean")
    if columns % WIDTH == 0 or spread > VAST:
        return (vector,)
    return (vector, Part(kind="classes", why=f"as many as no vector has: {columns}", form="logits", axis=1, rows=True))


ROW: tuple[Rule, ...] = (_features, _row_in_range, _one_number, _pattern, _positive, _echo, _class_row)
