"""Training of the weights of a subgraph with Adam; the result is the best candidate on held-out batches.

Candidates are the weights after some of the epochs, their running means, and points on the line from the initial
weights to the best of these.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxgrail.core import Array, Bools
from onnxgrail.torchgraph.call import Tensor, as_array, as_tensor
from onnxgrail.torchgraph.program import Program, agree, tensors, trainable

WARM = 0.05  # share of all steps in which the learning rate warms up
PARTS = (0.4, 0.6, 0.8)  # step lengths on the line from the initial weights to the best ones
LOOKS = 10  # most times that a descent is evaluated on held-out batches, unless its time is limited
FAR = 100.0  # times the initial error: a descent this bad does not recover and ends


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """A batch of inputs, target outputs and the mask (sample, token) of real tokens; None if there is no padding."""

    inputs: Mapping[str, Array]
    goals: Mapping[str, Array]
    mask: Bools | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a fit.

    Attributes:
        rate: learning rate after warm-up, relative to each weight's root mean square.
        near: if the initial error is below one, scale the rate by its square root: near a solution, large steps lose
            it.
        late: share of a descent before which no candidate is chosen: on few held-out batches, small early gains are
            chance and would keep the fit from trying a smaller rate.
        epochs: passes over the batches.
        steps: minimum number of steps in total.
        each: number of batches per epoch, all used equally often; None for all.
        clip: maximum norm of the gradient.
        seconds: time after which no epoch starts; None for no limit.
        seed: seed of the order of the batches.
        divergence: outputs that hold distributions along their last axis. Their loss is the Kullback-Leibler divergence
            plus the squared error; that of other outputs is the squared error.
        probable: outputs of `divergence` that hold probabilities instead of logits.
        sizes: root mean squares to use for weights whose own says little, such as weights initialized to zero.
    """

    rate: float = 1e-2
    near: bool = False
    late: float = 0.0
    epochs: int = 10
    steps: int = 200
    each: int | None = None
    clip: float = 1.0
    seconds: float | None = None
    seed: int = 0
    divergence: frozenset[str] = frozenset()
    probable: frozenset[str] = frozenset()
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """The errors on held-out batches before and after a fit, its epochs, and the new weights if the error decreased."""

    before: float
    after: float
    epochs: int
    arrays: Mapping[str, Array]


Batches = Sequence[Callable[[], Batch]]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The batches of a fit: those that weights are trained on, and held-out batches that choose the result."""

    learnt: Batches
    held: Batches


def fit(
    piece: ir.Model,
    names: Sequence[str],
    samples: Samples,
    settings: Settings,
    *,
    expected: Mapping[str, Array],
    tick: Callable[[], None],
) -> Fit:
    """Train the named weights of a subgraph so that its outputs approach the goals.

    Args:
        piece: computes the goals' names from the inputs' names.
        names: initializers to train.
        samples: training batches and held-out batches.
        settings: settings of the fit.
        expected: ONNX Runtime's outputs for the first batch, to check that torch computes the same function.
        tick: called once per epoch.

    Raises:
        UnsupportedOpError: an operator without gradient.
        ModelError: torch and ONNX Runtime disagree.
    """
    program = trainable(piece)
    agree(program, samples.learnt[0]().inputs, expected, piece.graph.name or "the model")
    energy = _energy(samples.learnt[: settings.each], settings)
    fitted = _Fitted(program, {n: piece.graph.initializers[n] for n in names}, settings, energy)
    fitted.begin(0.0)
    before = fitted.error(samples.held, fitted.weights)
    started, epochs = time.perf_counter(), 0
    if before == 0:
        return Fit(before=before, after=before, epochs=0, arrays={})
    first = settings.rate * (math.sqrt(min(before, 1.0)) if settings.near and math.isfinite(before) else 1.0)
    for rate in (first, first / 4):  # if the steps were too large, smaller steps may succeed
        best, found, ran = _trained(fitted, rate, before, samples, started, tick)
        epochs += ran
        if best < before:
            best, found = _nearer(fitted, best, found, samples.held)
            return Fit(before=before, after=best, epochs=epochs, arrays=fitted.arrays(found))
    return Fit(before=before, after=before, epochs=epochs, arrays={})


def _trained(
    fitted: _Fitted,
    rate: float,
    before: float,
    samples: Samples,
    started: float,
    tick: Callable[[], None],
) -> tuple[float, dict[str, Tensor], int]:
    """Run a descent from the initial weights; return the smallest error, its weights and the number of epochs.

    The error may rise at first: early steps of Adam have poor moment estimates, and later steps compensate.
    """
    batches, held, settings = samples.learnt, samples.held, fitted.settings
    best, found = before, fitted.begin(rate)
    first = time.perf_counter() - started
    each = settings.each or len(batches)
    total = max(settings.epochs, math.ceil(settings.steps / each))
    order = _shuffled(len(batches), settings.seed)
    apart = -(-total // LOOKS) if settings.seconds is None else 1
    for epoch in range(total):
        spent = time.perf_counter() - started
        if not math.isfinite(before) or (settings.seconds is not None and spent >= settings.seconds):
            return best, found, epoch
        share = 0.0 if settings.seconds is None else (spent - first) / (settings.seconds - first)
        for number, k in enumerate(itertools.islice(order, each)):
            fitted.step(batches[k](), _share(max((epoch + number / each) / total, share)))
        tick()
        if (total - epoch - 1) % apart:
            continue
        late = max((epoch + 1) / total, share) >= settings.late
        now, mean = fitted.error(held, fitted.weights), fitted.error(held, fitted.mean) if late else math.inf
        if late and min(now, mean) < best:
            best, found = min(now, mean), _copy(fitted.mean if mean < now else fitted.weights)
        elif not now < FAR * before:
            return best, found, epoch + 1
    return best, found, total


def _nearer(fitted: _Fitted, best: float, found: dict[str, Tensor], held: Batches) -> tuple[float, dict[str, Tensor]]:
    """Return the best weights on the line between initial and found weights, and their error.

    With few samples the full step overfits: `distill` of a sentence encoder reduced the held-out error from 0.0919 to
    0.0898, and to 0.0880 with a step of length 0.6.
    """
    nearest = found
    for part in PARTS:
        weights = {n: torch.lerp(fitted.program.weights[n].detach(), w, part) for n, w in found.items()}
        now = fitted.error(held, weights)
        if now < best:
            best, nearest = now, weights
    return best, nearest


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """Yield all numbers in random order, repeatedly."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(count).tolist()


def _share(done: float) -> float:
    """Return the share of the full learning rate: linear warm-up, then cosine decay."""
    return done / WARM if done < WARM else 0.5 + 0.5 * math.cos(math.pi * (done - WARM) / (1 - WARM))


def _energy(batches: Batches, settings: Settings) -> dict[str, float]:
    """Return the mean square of every goal, so that goals of all magnitudes count alike."""
    sums: dict[str, list[float]] = {}
    for make in batches:
        batch = make()
        for name, goal in batch.goals.items():
            if name not in settings.divergence:
                wide = np.asarray(shown(goal, batch.mask), dtype=np.float32)
                one = sums.setdefault(name, [0.0, 0.0])
                one[0] += float(np.vdot(wide, wide))
                one[1] += wide.size
    return {name: max(square / max(count, 1.0), 1e-30) for name, (square, count) in sums.items()}


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: w.detach().clone() for n, w in weights.items()}


class _Fitted:
    """The trained weights and the optimizer of one call of `fit`."""

    def __init__(
        self, program: Program, values: Mapping[str, ir.Value], settings: Settings, energy: Mapping[str, float]
    ) -> None:
        self.program, self.values, self.settings, self.energy = program, values, settings, energy
        self.rate = 0.0

    def begin(self, rate: float) -> dict[str, Tensor]:
        """Reset to the initial weights with this learning rate; return those weights."""
        self.rate = rate
        self.weights = {n: self.program.weights[n].detach().clone().requires_grad_() for n in self.values}
        sizes = {n: float(w.detach().square().mean().sqrt()) for n, w in self.weights.items()}
        floor = 0.1 * sorted(sizes.values())[len(sizes) // 2]  # a bias of zeros must be able to change
        known = self.settings.sizes
        groups = [
            {"params": [w], "lr": 0.0, "size": known.get(n, max(sizes[n], floor))} for n, w in self.weights.items()
        ]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.999))
        self.mean, self.taken = _copy(self.weights), 0
        return _copy(self.weights)

    def step(self, batch: Batch, share: float) -> None:
        """Take a step of Adam at this share of the full rate."""
        for group in self.adam.param_groups:
            group["lr"] = self.rate * share * group["size"]
        self.adam.zero_grad()
        loss = self._loss(batch, self.weights)
        if not bool(torch.isfinite(loss)):
            return
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.settings.clip)
        self.adam.step()
        self.taken += 1
        for name, mean in self.mean.items():  # running mean of all weights so far, each weighted by its step number
            mean.lerp_(self.weights[name].detach(), 2 / (self.taken + 1))

    def error(self, batches: Batches, weights: Mapping[str, Tensor]) -> float:
        """Return the mean loss with the weights rounded as in the file."""
        rounded = {n: as_tensor(a, self.program.floats) for n, a in self.arrays(weights).items()}
        with torch.no_grad():
            found = [float(self._loss(make(), rounded)) for make in batches]
        mean = float(np.mean(found))
        return max(mean, 0.0) if math.isfinite(mean) else math.inf  # a divergence of zero may round below zero

    def arrays(self, state: Mapping[str, Tensor]) -> dict[str, Array]:
        """Return the weights in the dtypes of the graph."""
        found = {}
        for name, tensor in state.items():
            dtype = self.values[name].const_value.dtype  # type: ignore[union-attr]
            found[name] = as_array(tensor, dtype.numpy())
        return found

    def _loss(self, batch: Batch, weights: Mapping[str, Tensor]) -> Tensor:
        given = tensors(batch.inputs, self.program.floats)
        found = self.program.run(given, list(batch.goals), override=weights)
        return sum(self._distance(n, y, as_tensor(batch.goals[n]), batch.mask) for n, y in found.items())

    def _distance(self, name: str, y: Tensor, goal: Tensor, mask: Bools | None) -> Tensor:
        goal = goal.to(y.dtype)
        y, goal = shown(y, mask), shown(goal, mask)
        if name in self.settings.divergence:
            # With few samples the divergence vanishes long before the logits agree: their distance helps.
            distance = (y - goal).square().mean() / goal.square().mean().clamp(min=1e-30)
            return divergence(y, goal, probable=name in self.settings.probable) + distance
        return (y - goal).square().mean() / self.energy[name]


def shown(values: Any, mask: Bools | None) -> Any:
    """Return the values (batch, length, ...) without padding, array or tensor."""
    if mask is None or values.ndim < 2 or tuple(values.shape[:2]) != mask.shape:
        return values
    return values[torch.from_numpy(mask)] if isinstance(values, torch.Tensor) else values[mask]


def divergence(y: Tensor, goal: Tensor, *, probable: bool) -> Tensor:
    """Return the mean Kullback-Leibler divergence from `goal` of rows along the last axis, in nats.

    Args:
        y: (..., classes) logits or probabilities.
        goal: of the same shape.
        probable: True for probabilities.
    """
    if probable:
        ours, theirs = (t.clamp(min=1e-30).log() for t in (y, goal))
    else:
        ours, theirs = (torch.log_softmax(t, -1) for t in (y, goal))
    terms = torch.where(theirs.isneginf(), torch.zeros_like(theirs), theirs.exp() * (theirs - ours))
    return terms.sum(-1).mean()
