"""Rules for outputs with one row of numbers, or one number, per sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.kinds.part import (
    ACTIONS,
    ACTIVE,
    ALIKE,
    BOX,
    COMMON,
    DECISIVE,
    FEATURES,
    FEW,
    LOUD,
    OFTEN,
    SLACK,
    SURELY,
    Look,
    Part,
    Rule,
    between,
    centered,
    in_unit,
    probabilities,
    units_of,
    values,
    vary_alone,
)
from onnxgrail.fidelity.kinds.read import about_row

SHARP = 0.2  # least mean of the highest probability for many columns to count as class scores
FLAT = 0.1  # share of the way from equal probabilities to a certain class below which a softmax is flat
MEAN = 0.5  # share of the mean over samples in the energy from which on a row is no embedding
WIDTH = 16  # the number of columns of an embedding is a multiple of this, that of class scores hardly ever
VAST = 30.0  # spread of a row from which on it holds no scores at all
VISIBLE = 0.001  # least standard deviation of chances that differ
RARELY = 0.05  # largest share of samples with a score above 0.1, for chances that stay low
NARROW = 0.1  # standard deviation of chances, all near each other, up to which an error of 1 % would hide their order
PAIR = 2  # columns of an event and its complement
SMOOTH = 0.8  # least correlation of neighbors in a field or a curve
OWN = "that vary on their own"
PATTERN = 0.1  # most variance between samples, as a share of the total, for one common pattern


def _features(look: Look) -> tuple[Part, ...]:
    columns, lengths = look.rows.shape[1], np.linalg.norm(look.rows, axis=1)
    named = bool(FEATURES.search(look.words)) and columns > SURELY and not DECISIVE.search(look.words)
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
    """Return True for chances (samples, columns) that are near each other, or for those of events that stay rare."""
    columns = chances.shape[1]
    if kind == "scores":
        near = columns <= FEW and between(chances) and chances.std(axis=0).max() < NARROW
        seldom = min(np.mean(side.max(axis=1) > ACTIVE) for side in (chances, 1 - chances)) < RARELY
        return bool(near or (seldom and chances.std(axis=0).max() > VISIBLE))
    if columns > PAIR:
        best = np.partition(chances, -2, axis=1)[:, -2:]
        return bool(np.diff(best).mean() < NARROW)
    event = chances[:, -1]
    sides, spread, rare = np.unique(event >= OFTEN), event.std(), min(event.mean(), 1 - event.mean())
    return bool(spread < NARROW if len(sides) > 1 else spread > max(VISIBLE, NARROW * rare))


def _labelled(look: Look) -> tuple[Part, ...]:
    """Detect scores of classes by the labels of the data: each sample has one of as many as there are scores."""
    if not 1 < look.rows.shape[1] == look.clues.classes:
        return ()
    return (Part(kind="classes", why="as many as classes of the labels", form="logits", axis=1, rows=True),)


def _one_number(look: Look) -> tuple[Part, ...]:
    """Detect a raw score by its name, which may also be that of a learned number: a reward, an energy, a grade."""
    if look.rows.shape[1] > 1:
        return ()
    number = differing(look, "one number")
    if not look.named or look.array.min() > 0 or np.abs(look.array).mean() > LOUD:  # of logits, some are below 0
        return (number,)
    score = Part(kind="classes", why="named as a score", form="binary")
    return (score, number) if look.telling else (score,)


def _ratings(look: Look) -> tuple[Part, ...]:
    """Return numbers that are named as scores, but hardly ever below 0, as a grade of 0 to 5 is that is learned."""
    rare = look.telling and 0 < np.mean(look.rows < 0) < RARELY
    return (differing(look, "named as scores, hardly ever below 0"),) if rare else ()


def _pattern(look: Look) -> tuple[Part, ...]:
    """Detect rows that hardly differ from their mean, such as points of a face; class scores differ."""
    rows = look.rows
    if not look.telling or look.named:
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
    few = mean is not None and spread.size <= FEW
    units = np.maximum(spread, ALIKE * spread.max()) if few else units_of(look) if mean is not None else None
    return Part(kind="values", why=why, center=mean, units=units)


def with_relative(look: Look, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Add the differences from the mean of a row where that is most of the variance, as for values of actions."""
    values = len(parts) == 1 and parts[0].kind == "values" and parts[0].center is not None and parts[0].columns is None
    rest = look.rows - look.rows.mean(axis=0)
    if not values or look.array.shape != look.rows.shape or rest.mean(axis=1).var() <= COMMON * rest.var(axis=0).mean():
        return parts
    own = differing(replace(look, array=about_row(look.array)), "differences from the mean of the row")
    return (*parts, replace(own, relative=True)) if own.center is not None else parts


def _positive(look: Look) -> tuple[Part, ...]:
    """Detect rows of numbers above 0, such as ratings: of logits some are below, since their mean stays near 0.

    Many numbers of which some are 0 are what a ReLU leaves; scores of a few classes may be that, too.
    """
    least = look.array.min()
    if look.rows.shape[1] <= FEW:
        return (differing(look, "a few numbers, all above 0"),) if least > 0 else ()
    if least < 0 or look.named:
        return ()
    if least > 0 and centered(look, COMMON) is not None:  # such as temperatures: all directions are near each other
        return (differing(look, "many numbers, all above 0, around a common mean"),)
    if _is_smooth(look):
        return (differing(look, "a spectrum or a curve, none below 0"),)
    return (Part(kind="embedding", why="one row of many numbers, none below 0"),)


def _is_smooth(look: Look) -> bool:
    """Return True for rows whose neighbors rise and fall together, as in a field, a curve or a spectrum."""
    if not look.telling or look.rows.shape[1] <= FEW:
        return False
    rest = look.rows - look.rows.mean(axis=0)
    spread = rest.std(axis=0)
    near = (rest[:, 1:] * rest[:, :-1]).mean(axis=0)
    pairs = spread[1:] * spread[:-1]
    return bool(near[pairs > 0].sum() > SMOOTH * pairs.sum() > 0)


def _echo(look: Look) -> tuple[Part, ...]:
    """Detect what an autoencoder makes of an input."""
    known = look.words in look.clues.echoes and not look.masked  # a mask of actions resembles their scores
    return (differing(look, "resembles an input"),) if known else ()


def _class_row(look: Look) -> tuple[Part, ...]:
    named, columns = look.named, look.rows.shape[1]
    few, equal = columns <= FEW, 1 / columns
    least = equal + FLAT * (1 - equal) if few else SHARP
    spread = np.median(look.rows.std(axis=1))
    if named or ((few or spread <= LOUD) and probabilities(look.rows, "logits").max(axis=1).mean() >= least):
        why = "named as scores" if named else "one row of scores"
        classes = Part(kind="classes", why=why, form="logits", axis=1, rows=True)
        alone = not look.masked and vary_alone(look, look.rows)
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
    return ()


def _vector(look: Look) -> tuple[Part, ...]:
    """Detect a field, or an embedding, beside which scores of classes are possible that are near each other."""
    columns, spread = look.rows.shape[1], np.median(look.rows.std(axis=1))
    if _is_smooth(look) or units_of(look) is not None:
        return (differing(look, "a field or a curve, or numbers of other units"),)
    vector = Part(kind="embedding", why="one row of many numbers, no class stands out")
    if centered(look, MEAN) is not None:
        vector = differing(look, "one row of many numbers around a common mean")
    if columns % WIDTH == 0 or spread > VAST:
        return (vector,)
    return (vector, Part(kind="classes", why=f"as many as no vector has: {columns}", form="logits", axis=1, rows=True))


ROW: tuple[Rule, ...] = (
    _features,
    _row_in_range,
    _labelled,
    _one_number,
    _pattern,
    _positive,
    _echo,
    _class_row,
    _vector,
)
