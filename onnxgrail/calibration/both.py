"""Runs of two models on the same feeds, to compare their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import part_of, spread
from onnxgrail.calibration.feeds.signature import padding_mask, takes_vectors
from onnxgrail.calibration.runtime.session import USUAL, Session, Setup, open_session
from onnxgrail.calibration.texts import Text, text_of
from onnxgrail.core import Feed, Labels
from onnxgrail.fidelity import Clues, Tally, clues_of
from onnxgrail.fidelity.changes import Base, bases_of, may_resemble
from onnxgrail.fidelity.goals import Goals
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.lists import Lists, open_axes
from onnxgrail.fidelity.lists.ranked import aligned, scores_alone
from onnxgrail.fidelity.tally import FIRST
from onnxgrail.graph.io.serial import Packed
from onnxgrail.graph.rewrite.interface import Port, fit
from onnxgrail.machine.progress import Progress, silent

PLACES = 4  # least number of feeds from which the content of outputs is detected, if there are so many

Source = Packed | bytes | str | Path
Fed = tuple[Feed, Labels | None]
"""A feed, and the true classes of its samples."""
Run = Callable[[Callable[[], Feed], Feed], Feed]
"""Returns the outputs of a model for a feed, given what makes the feed, and the feed."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two models that are compared.

    Attributes:
        a: the reference.
        b: the model that is judged.
        ports: inputs and outputs of `a` that `b` lacks or has narrower; the rest is fed and compared.
    """

    a: Source
    b: Source
    ports: Sequence[Port] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Comparer:
    """Compares runs of two models on the same feeds.

    Attributes:
        clues: known facts about the inputs.
        text: the tokens that the model predicts, None if there are none.
        lists: finds outputs whose length depends on the values of the inputs.
        vectors: the inputs have no axis that counts samples.
        bases: by output, the input that it resembles.
        samples: by output, the axis that counts samples if it is not the first.
    """

    clues: Clues
    text: Text | None
    lists: Lists
    vectors: bool = False
    bases: Mapping[str, Base] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)

    def upright(self, outputs: Feed) -> Feed:
        """Return outputs with the axis that counts samples first."""
        return _upright(outputs, self.samples)

    def single(self, feed: Feed) -> bool:
        """Return True if a feed is one sample."""
        return self.vectors or all(array.ndim == 0 or len(array) == 1 for array in feed.values())

    def add(self, tally: Tally, fed: Fed, wanted: Feed, got: Feed, ports: Sequence[Port]) -> None:
        """Add one feed to a tally; padded tokens are left out.

        Args:
            tally: of both models.
            fed: the feed, and the true classes of its samples.
            wanted: outputs of the reference.
            got: outputs of the other model.
            ports: inputs and outputs that the other model lacks or has narrower.
        """
        feed, labels = fed
        goals = Goals(labels=labels)
        if self.text is not None:
            goals = Goals(labels=labels, tokens=feed[self.text.tokens], scores=self.text.scores)
        single = self.single(feed)
        one, two = self.lists.leveled(feed, self.upright(fit(wanted, ports)), self.upright(got))
        listed = self.lists.growing if single else frozenset()
        self.clues.detected.update(() if tally.known else scores_alone(one, listed))
        two = aligned(one, two, listed)
        bases = {name: base.of(feed) for name, base in self.bases.items() if name in one}
        bases = {name: base for name, base in bases.items() if base.shape == one[name].shape}
        tally.add(one, two, mask=padding_mask(feed), goals=goals, single=single, bases=bases)


def comparer_of(reference: Session, batches: Batches, run: Run, *, texts: bool) -> Comparer:
    """Return what the first feed and its outputs tell about a model; others tell if an output resembles an input.

    Args:
        reference: runs the model.
        batches: the feeds.
        run: see `Run`.
        texts: test if the model predicts tokens of the feed, which costs a run.
    """
    make, synthetic = batches.feeds[0], batches.synthetic
    feed = make()
    wanted = run(make, feed)
    axes = _axes_of_samples(reference, wanted)
    wanted = _upright(wanted, axes)
    shapes = {name: _first(shape, axes.get(name, 0)) for name, shape in reference.shapes.items()}
    looked = texts and not synthetic
    text = text_of(lambda feed: _upright(reference.run(feed), axes), feed, wanted) if looked else None
    scores = None if text is None else text.scores
    clues = clues_of(feed, wanted, scores=scores, known=looked, synthetic=synthetic)
    every = _spread(batches).feeds if may_resemble(feed, wanted) else ()
    bases = bases_of((fed, _upright(run(made, fed), axes)) for made in every for fed in [made()])
    bases = {name: base for name, base in bases.items() if not clues.is_state(name, wanted[name].shape)}
    changes, classes = {name: base.units for name, base in bases.items()}, batches.highest_class + 1
    clues = replace(clues, changes=changes, classes=classes, contents=batches.contents)
    lists, vectors = Lists(open_axes(shapes), clues.lists), takes_vectors(reference.given.values())
    return Comparer(clues, text, lists, vectors, bases, axes)


def _axes_of_samples(reference: Session, outputs: Feed) -> dict[str, int]:
    """Return the axis that counts samples, for outputs in which it is not the first: its name tells.

    All inputs with open sizes begin with that name, and no shape has it twice.
    """
    given = [shape for shape in reference.given.values() if any(isinstance(size, str) for size in shape)]
    names = {shape[0] for shape in given}
    name = names.pop() if len(names) == 1 else None
    if not isinstance(name, str) or any(shape.count(name) > 1 for shape in given):
        return {}
    found = {output: shape.index(name) for output, shape in reference.shapes.items() if shape.count(name) == 1}
    return {output: axis for output, axis in found.items() if 0 < axis < np.ndim(outputs[output])}


def _first(shape: list[Any], axis: int) -> list[Any]:
    """Return a shape with one of its sizes first."""
    return [*shape[axis : axis + 1], *shape[:axis], *shape[axis + 1 :]]


def _upright(outputs: Feed, axes: Mapping[str, int]) -> Feed:
    """Return outputs with the axis that counts samples first."""
    return {**outputs, **{name: np.moveaxis(outputs[name], axes[name], 0) for name in axes if name in outputs}}


def _spread(batches: Batches) -> Batches:
    """Return feeds from all over the data that show what a model's outputs hold."""
    count = max(math.ceil(FIRST * len(batches) / max(batches.samples, 1)), PLACES)
    return part_of(batches, spread(batches, min(count, len(batches))))


def content_of(comparer: Comparer, batches: Batches, run: Run) -> dict[str, tuple[Part, ...]]:
    """Detect the content of a model's outputs from samples of all feeds.

    The first samples do not show it: data are often in order, by class or by time.

    Args:
        comparer: of the model with others.
        batches: the feeds.
        run: see `Run`.
    """
    some = _spread(batches)
    tally = Tally(comparer.clues, brief=True, first=some.samples)
    for make, fed in zip(some.feeds, some.labelled(), strict=True):
        wanted = run(make, fed[0])
        comparer.add(tally, fed, wanted, wanted, ())
    tally.tables()
    return tally.known


def run_both(
    pair: Pair,
    batches: Batches,
    setup: Setup = USUAL,
    *,
    texts: bool = False,
    judge: bool = True,
    progress: Progress = silent,
) -> Tally:
    """Run two models on all batches and compare every output; padded tokens are left out.

    Args:
        pair: the models.
        batches: the feeds of both.
        setup: how both are run.
        texts: test if the model predicts tokens of the feeds, which costs a run of `a`.
        judge: also judge every output by the measure that suits it, not only by distances.
        progress: called once per feed.
    """
    tally = Tally(judge=judge)
    total = len(batches)
    with ExitStack() as stack:
        one, two = (stack.enter_context(open_session(model, setup)) for model in (pair.a, pair.b))
        first: dict[Callable[[], Feed], Feed] = {}

        def run(make: Callable[[], Feed], feed: Feed) -> Feed:
            if not first:
                first[make] = one.run(feed)
            return first[make] if make in first else one.run(feed)

        comparer = comparer_of(one, batches, run, texts=texts)
        tally.clues = comparer.clues
        if judge and batches.samples > FIRST:
            tally.known |= content_of(comparer, batches, run)
        for number, (make, fed) in enumerate(zip(batches.feeds, batches.labelled(), strict=True)):
            progress("compare", number, total)
            comparer.add(tally, fed, run(make, fed[0]), two.run(fit(fed[0], pair.ports)), pair.ports)
        progress("compare", total, total)
    return tally
