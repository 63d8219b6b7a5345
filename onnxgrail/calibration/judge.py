"""Losses of candidates against the original model, whose outputs are computed once for many candidates."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.both import Fed, comparer_of, content_of
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import part_of
from onnxgrail.calibration.metric import Metric, arrays_of, outputs_of
from onnxgrail.calibration.runtime.session import Session, Setup, open_session
from onnxgrail.core import Array, Feed, Floats, Labels
from onnxgrail.errors import DataError
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.loss import Loss, beyond, worst_loss
from onnxgrail.graph.cuts.scored import chosen_by, scored
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite.interface import Port, between, fit

HELD = 2**28  # bytes of the original's outputs that stay in memory


class Outputs:
    """The outputs of a model by feed, up to `HELD` bytes; those of further feeds are computed again.

    Attributes:
        known: their content; empty until `Judge.detect`.
    """

    def __init__(self, known: dict[str, tuple[Part, ...]] | None = None) -> None:
        self.known = {} if known is None else known
        self._held: dict[Hashable, dict[str, Array]] = {}
        self._room = HELD

    def of(self, feed: Hashable, run: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """Return the outputs for a feed: those in memory, or those that `run` computes."""
        if feed in self._held:
            return self._held[feed]
        found = run()
        size = sum(array.nbytes for array in found.values() if hasattr(array, "nbytes"))
        if size <= self._room:
            self._held[feed] = found
            self._room -= size
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Outputs of a candidate.

    Attributes:
        numbers: of the feeds that judge it.
        run: yields the outputs for each of these feeds; those that do not differ from the original's may lack.
        ports: inputs and outputs that the candidate has narrower.
    """

    numbers: Sequence[int]
    run: Callable[[Iterator[Feed]], Iterator[Mapping[str, Array]]]
    ports: Sequence[Port]


Opened = AbstractContextManager[Answers]
"""Gives the outputs of a candidate as long as it is open."""


class Judge:
    """A context manager that runs the original model on some feeds, and candidates against it.

    Judges of the same model and providers may share the outputs of the original (see `Outputs`).  A model
    that gives only labels is judged by the scores that it chose them by, unless there is a metric.  `brief` leaves
    out what only the agreement of a loss needs, which may then be NaN.
    """

    def __init__(
        self,
        model: ir.Model,
        batches: Batches,
        providers: Sequence[str],
        metric: Metric | None = None,
        *,
        brief: bool = False,
        outputs: Outputs | None = None,
    ) -> None:
        self._model, self._batches, self._metric, self._brief = model, batches, metric, brief
        self._shown = scored(model) if metric is None else None
        heavy = bool(in_files(model))
        self._setup = Setup(providers=tuple(providers), optimise=not heavy, once=heavy)
        self._held = outputs or Outputs()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._original: Session = self._stack.enter_context(open_session(pack(self._shown or self._model), self._setup))
        self._comparer = comparer_of(self._original, self._batches, self._made, texts=True)
        if self._metric is not None:
            self._metric.check(*self._originals(range(len(self._batches))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def loss(self, *candidates: tuple[ir.Model, Sequence[int]]) -> Loss:
        """Return the loss of the worst output over all samples.

        Args:
            *candidates: models with the numbers of the feeds on which each is judged.

        Raises:
            ModelError: ONNX Runtime does not run a candidate.
            DataError: no output can be compared.
            MetricError: the user's function fails.
        """
        samples = [number for _, numbers in candidates for number in numbers]
        if self._metric is not None:
            reference, labels, alone = self._originals(samples)
            outputs = [feed for slim, numbers in candidates for feed in self._outputs(slim, numbers)]
            return self._metric.losses(reference, outputs, labels, alone)
        answers = (self.running(slim, numbers) for slim, numbers in candidates)
        return self.loss_of(answers, samples)

    @contextmanager
    def running(self, slim: ir.Model, numbers: Sequence[int]) -> Iterator[Answers]:
        """Give the outputs of a candidate for some feeds; narrower inputs and outputs where both models have them."""
        ports = between(self._model, slim)
        seen = slim if self._shown is None else scored(slim) or slim
        with open_session(pack(seen), self._setup) as session:
            yield Answers(numbers, lambda feeds: (session.run(fit(feed, ports)) for feed in feeds), ports)

    def loss_of(self, answers: Iterable[Opened], samples: Sequence[int], limit: float = math.inf) -> Loss:
        """Return the loss of the worst output, without the user's function.

        Args:
            answers: of candidates, each on some of the feeds; the next ones are opened when these are judged.
            samples: numbers of all these feeds.
            limit: if the feeds so far show that the loss exceeds it whatever the others lose, these do not judge.

        Raises:
            ModelError: ONNX Runtime does not run a candidate.
            DataError: no output can be compared.
        """
        tally, done = self._tally(), 0
        for opened in answers:
            with opened as one:
                here, there = itertools.tee(self._fed(one.numbers))
                for number, fed, found in zip(one.numbers, here, one.run(feed for feed, _ in there), strict=True):
                    wanted = self._wanted(number, fed[0])
                    self._comparer.add(tally, fed, wanted, {**wanted, **found}, one.ports)
                done += len(one.numbers)
            if done < len(samples) and (loss := beyond(tally, limit, done / len(samples))) is not None:
                return loss
        return _worst(tally)

    @property
    def own(self) -> bool:
        """Return True if the user's function judges."""
        return self._metric is not None

    def content(self) -> Floats:
        """Return (feeds,) the content of each feed: its scores above 0.1; 1 each for outputs without scores."""
        numbers = range(len(self._batches))
        tally, rows, nothing = self._tally(), list[dict[str, int]](), np.ones(len(numbers))
        known = tally.known
        for number, fed in zip(numbers, self._fed(numbers), strict=True):
            wanted = self._wanted(number, fed[0])
            self._comparer.add(tally, fed, wanted, wanted, ())
            upright = self._comparer.upright(wanted)
            rows.append({name: len(np.atleast_1d(value)) for name, value in upright.items()})
            if known.keys() >= wanted.keys() and all(p.kind != "scores" for parts in known.values() for p in parts):
                return nothing
        found = np.zeros(len(rows))
        for table in tally.tables():
            sums = table.active
            if sums is not None and sums.any():
                starts = np.cumsum([0] + [1 if len(sums) == len(rows) else row[table.output] for row in rows])
                if starts[-1] == len(sums):
                    found += np.add.reduceat(sums, starts[:-1]) / sums.mean()
        return found if found.any() else nothing

    def named(self, tensors: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
        """Yield the tensors of `read` by the names of the outputs, as far as there are any."""
        for found in tensors:
            yield {output: found[name] for output, name in self.read.items() if name in found}

    @functools.cached_property
    def read(self) -> Mapping[str, str]:
        """Return the tensors of the model that are compared, by the name of the output."""
        if self._shown is None:
            return {value.name or "": value.name or "" for value in self._model.graph.outputs}
        return {value.name or "": chosen_by(value) for value in self._shown.graph.outputs}

    def detect(self) -> None:
        """Detect the content of the outputs, once for all judges that share `Outputs`."""
        if not self._held.known:
            self._held.known |= content_of(self._comparer, self._batches, self._made)

    def _tally(self) -> Tally:
        self.detect()
        return Tally(self._comparer.clues, known=self._held.known, brief=self._brief)

    def _originals(self, numbers: Sequence[int]) -> tuple[list[Feed], list[Labels | None], list[bool]]:
        """Return the original's outputs for some feeds, the labels of their samples, and True for those of one."""
        fed = list(zip(numbers, self._fed(numbers), strict=True))
        reference: list[Feed] = [arrays_of(self._wanted(number, feed)) for number, (feed, _) in fed]
        return reference, [labels for _, (_, labels) in fed], [self._comparer.single(feed) for _, (feed, _) in fed]

    def _outputs(self, slim: ir.Model, numbers: Sequence[int]) -> tuple[Feed, ...]:
        """Return a candidate's outputs for some feeds."""
        return outputs_of(pack(slim), self.some(numbers), self._setup, between(self._model, slim))

    def some(self, numbers: Sequence[int]) -> Batches:
        """Return some of the feeds."""
        return part_of(self._batches, [self._batches.feeds[number] for number in numbers])

    def _fed(self, numbers: Sequence[int]) -> Iterator[Fed]:
        """Yield some feeds with the labels of their samples."""
        return self.some(numbers).labelled()

    def _wanted(self, number: int, feed: Feed) -> dict[str, Array]:
        """Return the original's outputs for the feed of a number."""
        return self._made(self._batches.feeds[number], feed)

    def _made(self, make: Callable[[], Feed], feed: Feed) -> dict[str, Array]:
        """Return the original's outputs for a feed, which a function makes."""
        return self._held.of((make, self._shown is None), lambda: self._original.run(feed))


def _worst(tally: Tally) -> Loss:
    """Return the loss of the worst output.

    Raises:
        DataError: no output can be compared.
    """
    found = worst_loss(tally)
    if found is None:
        raise DataError("the loss has no measure: none of the model's outputs can be compared")
    return found
