"""The user's own loss: a function of the outputs of the original and of a candidate."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.runtime.session import USUAL, Setup, open_session
from onnxgrail.core import Array, Feed, Floats, Ints, Labels
from onnxgrail.errors import MetricError
from onnxgrail.fidelity.loss import Agreement, Loss, upper_bound
from onnxgrail.graph.io.serial import Packed
from onnxgrail.graph.rewrite.interface import Port, fit
from onnxgrail.machine.scripts import beside, is_named, loaded

Function = Callable[[dict[str, Array], dict[str, Array], Array | None], Any]

GROUPS = 16  # of samples that are left out in turn, to bound one number for all samples
SAME = 1e-6  # largest loss of the original against itself
ASKED = "Return one finite number per sample, or one for all; 0 for outputs that equal the original's"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Metric:
    """A loss that the user's function computes.

    Attributes:
        name: of the function.
        function: takes outputs of the original and of a candidate by name, and labels or None; returns losses.
        folder: of its file, None for a function that was not read from a file.
    """

    name: str
    function: Function
    folder: Path | None = None

    def check(
        self,
        reference: Sequence[Feed],
        labels: Sequence[Labels | None] | None = None,
        alone: Sequence[bool] = (),
    ) -> None:
        """Check that the original has no loss against itself.

        Args:
            reference: outputs of the original by name, one dict per feed.
            labels: of the samples, per feed.
            alone: True for feeds of one sample, whose outputs may have several rows for it.

        Raises:
            MetricError: it has, or the function fails.
        """
        values, _ = self._values(_calls(reference, reference, labels, alone))
        far = np.flatnonzero(np.abs(values) > SAME)
        if len(far):
            where = f"for sample {far[0]}" if len(values) > 1 else "for all samples"
            what = f"{self.name} returned {values[far[0]]:g} {where} of the original against itself, expected 0"
            raise MetricError(what, hint="Return a loss that compares the candidate with the original")

    def losses(
        self,
        reference: Sequence[Feed],
        candidate: Sequence[Feed],
        labels: Sequence[Labels | None] | None = None,
        alone: Sequence[bool] = (),
    ) -> Loss:
        """Compute the loss of a candidate.

        If the function returns one number for all samples, it is called again without each of up to 16 groups of
        samples.  `values` of the result then has one number per group: the jackknife's pseudo-values.

        Args:
            reference: outputs of the original by name, one dict per feed.
            candidate: the same of the candidate.
            labels: of the samples, per feed.
            alone: as for `check`.

        Raises:
            MetricError: the function raises, or returns no usable losses; with its name and the sample.
        """
        calls = _calls(reference, candidate, labels, alone)
        values, whole = self._values(calls)
        mean = float(values.mean())
        if whole:
            values = self._without_groups(calls[0], mean)
        samples = sum(call.count for call in calls)
        nothing = Agreement(measure="", value=None, interval=None, higher=False, samples=samples, counted=False)
        bound = max(mean, upper_bound(values))
        return Loss(
            output="", part="", name=self.name, kind="metric", values=values, mean=mean, bound=bound, agreement=nothing
        )

    def _values(self, calls: Sequence[_Call]) -> tuple[Floats, bool]:
        """Return all losses, and True if they are one number for several samples."""
        if not calls:
            raise MetricError(f"{self.name}: there are no samples")
        results = [self._result(call) for call in calls]
        whole = len(calls) == 1 and results[0].ndim == 0 and calls[0].count > 1
        return np.concatenate([np.atleast_1d(result) for result in results]), whole

    def _without_groups(self, call: _Call, mean: float) -> Floats:
        """Return the pseudo-values of one number for all samples: the contribution of each group of samples."""
        every = np.arange(call.count)
        values = []
        for group in np.array_split(every, min(call.count, GROUPS)):
            rest = self._result(call.only(np.setdiff1d(every, group)))
            if rest.ndim:
                raise MetricError(f"{self.name} returned one number for all samples, but not for some", hint=ASKED)
            values.append((call.count * mean - (call.count - len(group)) * float(rest)) / len(group))
        return np.array(values)

    def _result(self, call: _Call) -> Floats:
        """Call the function and check its result: one number, or one per sample."""
        try:
            result = self._called(call)
        except (Exception, SystemExit) as error:
            what = f"{self.name} raised {type(error).__name__}: {error} ({self._culprit(call)}{self._line(error)})"
            raise MetricError(what, hint=f"The outputs are {', '.join(map(repr, call.reference))}") from error
        try:
            array = np.asarray(result)
        except Exception as error:
            raise MetricError(f"{self.name} returned {type(result).__name__}, no number", hint=ASKED) from error
        if array.dtype.kind not in "biuf":
            raise MetricError(f"{self.name} returned {_kind(result)}, no number ({call.place})", hint=ASKED)
        if array.shape not in ((), (call.count,)):
            count = f"{call.count} sample{'' if call.count == 1 else 's'}"
            raise MetricError(
                f"{self.name} returned an array of shape {list(array.shape)} for {count} ({call.place})", hint=ASKED
            )
        values = array.astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(np.atleast_1d(values)))
        if len(bad):
            place = call.place if values.ndim == 0 else f"sample {call.first + bad[0]}"
            what = "NaN" if np.isnan(np.atleast_1d(values)[bad[0]]) else "infinity"
            raise MetricError(f"{self.name} returned {what} ({place})", hint=ASKED)
        return values

    def _called(self, call: _Call) -> Any:
        context: AbstractContextManager[None] = nullcontext() if self.folder is None else beside(self.folder)
        labels = None if call.labels is None else np.array(call.labels)
        with context:  # the function may write into its arguments, which are copies
            return self.function(_copied(call.reference), _copied(call.candidate), labels)

    def _line(self, error: BaseException) -> str:
        """Return the last line of the function's file in which an error was raised, in words; empty without a file."""
        file = self.name.partition(":")[0]
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file]
        return f", line {lines[-1]}" if lines else ""

    def _culprit(self, call: _Call) -> str:
        """Return the first sample for which the function raises on its own, in words."""
        for sample in range(call.count if call.count > 1 else 0):
            with suppress(Exception, SystemExit):
                self._called(call.only(np.array([sample])))
                continue
            return f"sample {call.first + sample}"
        return call.place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """The arguments of one call.

    Attributes:
        reference: outputs of the original; candidate: of the candidate; labels: of the samples.
        count: number of samples; first: number of the first one.
    """

    reference: Feed
    candidate: Feed
    labels: Array | None
    count: int
    first: int = 0

    @property
    def place(self) -> str:
        """Return the samples in words."""
        last = self.first + self.count - 1
        return f"sample {self.first}" if self.count == 1 else f"samples {self.first} to {last}"

    def only(self, samples: Ints) -> _Call:
        """Return a call for some of the samples."""
        sides = ({name: array[samples] for name, array in side.items()} for side in (self.reference, self.candidate))
        reference, candidate = sides
        labels = None if self.labels is None else self.labels[samples]
        first = self.first + int(samples[0]) if len(samples) == 1 else self.first
        return _Call(reference=reference, candidate=candidate, labels=labels, count=len(samples), first=first)


def metric_of(source: str | os.PathLike[str] | Function) -> Metric:
    """Return the metric of a function, or of `file.py:function`, which is run.

    Raises:
        MetricError: there is no such function, or it does not take three arguments.
    """
    if callable(source):
        metric = Metric(name=getattr(source, "__name__", type(source).__name__), function=source)
    else:
        text = os.fspath(source)
        if not is_named(text):
            raise MetricError(f"{text!r} is not a function", hint="Give file.py:function")
        path = Path(text.rpartition(":")[0])
        with loaded(text, MetricError) as function:
            metric = Metric(name=f"{path.name}:{text.rpartition(':')[2]}", function=function, folder=path.parent)
    _check_arguments(metric)
    return metric


def _check_arguments(metric: Metric) -> None:
    hint = "It takes outputs of the original and of the candidate, and labels: function(reference, candidate, labels)"
    if not callable(metric.function):
        raise MetricError(f"{metric.name} is {_kind(metric.function)}, expected a function", hint=hint)
    try:
        inspect.signature(metric.function).bind({}, {}, None)
    except TypeError as error:
        raise MetricError(f"{metric.name} cannot be called with three arguments: {error}", hint=hint) from error
    except ValueError:
        return  # a built-in function without a signature


def outputs_of(
    model: Packed | bytes | str | Path, batches: Batches, setup: Setup = USUAL, ports: Sequence[Port] = ()
) -> tuple[Feed, ...]:
    """Run a model on all batches and return its outputs by name, one dict per feed; only arrays.

    Args:
        model: the original or a candidate.
        batches: the feeds.
        setup: how the model is run.
        ports: inputs and outputs of the original that a candidate lacks or has narrower.
    """
    with open_session(model, setup) as session:
        runs = (session.run(fit(feed, ports)) for feed in batches)
        return tuple(map(arrays_of, runs))


def arrays_of(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return the outputs that are arrays, by name."""
    return {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}


def _calls(
    reference: Sequence[Feed],
    candidate: Sequence[Feed],
    labels: Sequence[Labels | None] | None,
    alone: Sequence[bool],
) -> tuple[_Call, ...]:
    """Return one call for all samples, or one per feed if outputs cannot be joined.

    An output can be joined if its first axis counts samples and its other sizes are the same in all feeds.
    """
    known = [None if one is None else one.values for one in labels or [None] * len(reference)]
    counts = [_count(feed) for feed in reference]
    both = zip(counts, map(_count, candidate), alone or [False] * len(counts), strict=True)
    counts = [None if single and {one, two} != {1} else one for one, two, single in both]  # rows of lists
    calls, first = [], 0
    for number, (a, b) in enumerate(zip(reference, candidate, strict=True)):
        count = counts[number] or 1
        calls.append(_Call(reference=a, candidate=b, labels=known[number], count=count, first=first))
        first += count
    if not calls or None in counts or not all(_alike(side) for side in (reference, candidate)):
        return tuple(calls)
    some = [array for array in known if array is not None]
    if len(some) not in (0, len(known)):
        return tuple(calls)
    one, two = (
        {name: np.concatenate([feed[name] for feed in side]) for name in side[0]} for side in (reference, candidate)
    )
    return (_Call(reference=one, candidate=two, labels=np.concatenate(some) if some else None, count=first),)


def _count(outputs: Feed) -> int | None:
    """Return the number of samples of a feed, None if the first axes of its outputs differ."""
    sizes = {array.shape[0] if array.ndim else 0 for array in outputs.values()}
    return sizes.pop() or None if len(sizes) == 1 else None


def _alike(feeds: Sequence[Feed]) -> bool:
    """Return True if all feeds have the same outputs with the same sizes but for the number of samples."""
    shapes = [{name: (array.shape[1:], array.dtype) for name, array in feed.items()} for feed in feeds]
    return all(shape == shapes[0] for shape in shapes)


def _copied(outputs: Feed) -> dict[str, Array]:
    return {name: np.array(array) for name, array in outputs.items()}


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
