"""The proof that blocks can be narrowed exactly, run on the model itself before any decision.

The graph with some channels of each block removed is compared with the original, in which the weights of every consumer
for these channels are zero.  If outputs differ, or the narrowed graph does not run, the blocks at fault are found by
bisection and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.agreement import Trial, doubt, doubt_by_steps, same_function, trial_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Block, Bools, Refusal
from onnxgrail.errors import ModelError, RewriteError, StoppedError
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.machine.job import Job
from onnxgrail.machine.memory import give_back
from onnxgrail.machine.steps.codec import Record

Item = TypeVar("Item")
RUNS = 64  # maximum number of comparisons; each costs a run of both graphs
CHANGES = 24  # the same for changes that keep all widths
TOGETHER = "narrowing it together with the others does not give the masked result"
TIPS = 16  # maximum number of blocks left out in turn, if a step gives another result
TIPPED = "with its sums in another order, rounding tips a step such as a quantization, and an output moves by a level"
UNPROVED = f"not proved: after {RUNS} comparisons the blocks that differ from the masked result were not all found"


def prove(
    trial: Trial, blocks: Sequence[Block], widths: Mapping[str, int], dead: Bools | None = None
) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    """Return the blocks that narrow exactly, and refusals for the others.

    Args:
        trial: the model and the feeds of the comparisons.
        blocks: candidates.
        widths: number of channels that each keeps, by name.
        dead: mask of the channels to remove; None removes random channels.
    """
    survey, search = trial.survey, _Search(trial)

    def holds(some: Sequence[Block]) -> bool:
        gone = _sample(survey, some, widths) if dead is None else _among(survey, some, dead)
        return search.holds(some, gone)

    good = _passing(list(blocks), holds)
    if dead is not None and search.by_steps:
        good = _without_tip(search, good, lambda some: _among(survey, some, dead))
    names = {b.name for b in good}
    rest = UNPROVED if search.ended else TOGETHER
    return tuple(good), tuple(_refusal(b, search.doubts.get(b.name, rest)) for b in blocks if b.name not in names)


def proved(
    prepared: Prepared, job: Job, blocks: Sequence[Block], widths: Mapping[str, int], dead: Bools | None = None
) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    """Return what `prove` does for a prepared model; the first process computes the proof for all.

    Args:
        prepared: the traced model and its data.
        job: its recipe names the providers.
        blocks: candidates.
        widths: number of channels that each keeps, by name.
        dead: mask of the channels to remove; None removes random channels.
    """

    def proof() -> Record:
        trial = trial_of(prepared.model, prepared.survey, prepared.feed, job.recipe.providers)
        good, refusals = prove(trial, blocks, widths, dead)
        return Record(notes={"good": [b.name for b in good], "refusals": [asdict(r) for r in refusals]})

    found = job.steps.shared(proof).notes
    if in_files(prepared.model):  # large: return the memory of the comparisons
        give_back()
    return tuple(b for b in blocks if b.name in found["good"]), tuple(Refusal(**r) for r in found["refusals"])


def unchanged(
    prepared: Prepared, names: Sequence[str], change: Callable[[tuple[str, ...]], ir.Model], providers: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of changes that together leave the model the same function; those at fault are bisected.

    Args:
        prepared: the model and its data.
        names: of changes that should not change the function, such as another basis of some weights.
        change: returns the model with some of the changes, in the order of `names`.
        providers: execution providers.
    """
    left = iter(range(CHANGES))

    def holds(some: Sequence[str]) -> bool:
        if next(left, None) is None:
            return False
        try:
            other = change(tuple(some))
            return same_function(prepared.model, other, prepared.feed, providers, prepared.survey.facts)
        except StoppedError:
            raise
        except (ModelError, RewriteError):  # the runtime does not run what came of it
            return False

    return tuple(_passing(list(names), holds))


@dataclass(slots=True, eq=False)
class _Search:
    """The comparisons of a proof.

    Attributes:
        runs: number of comparisons so far.
        ended: True if more comparisons were needed than allowed.
        doubts: reasons why single blocks failed.
        by_steps: True if outputs alone do not decide.
    """

    trial: Trial
    runs: int = 0
    ended: bool = False
    doubts: dict[str, str] = field(default_factory=dict)
    by_steps: bool = False

    def holds(self, blocks: Sequence[Block], dead: Bools) -> bool:
        """Return True if the blocks narrow exactly together; False, without a run, after too many comparisons."""
        if self.runs >= RUNS:
            self.ended = True
            return False
        self.runs += 1
        why = "" if self.by_steps else doubt(self.trial, blocks, dead)
        if self.by_steps or (why and self.trial.steps):
            self.by_steps = True
            why = doubt_by_steps(self.trial, blocks, dead)
        if why and len(blocks) == 1:
            self.doubts[blocks[0].name] = why
        return not why


def _without_tip(search: _Search, blocks: list[Block], gone: Callable[[Sequence[Block]], Bools]) -> list[Block]:
    """Leave out a single block if the others then give exactly the masked outputs; else keep all.

    Narrowed sums are added in another order, so occasionally a sum falls on the other side of a rounding step.
    """
    if len(blocks) < 2 or not doubt(search.trial, blocks, gone(blocks)):
        return blocks
    for block in sorted(blocks, key=_numbers)[:TIPS]:
        others = [b for b in blocks if b is not block]
        if not doubt(search.trial, others, gone(others)):
            search.doubts[block.name] = TIPPED
            return others
    return blocks


def _numbers(block: Block) -> int:
    """Return how many weight positions along pruned axes belong to a block's channels."""
    return sum(slot.index.size for slot in block.slots)


def _refusal(block: Block, reason: str) -> Refusal:
    return Refusal(value=block.slots[0].initializer, node=block.nodes[0], op=block.kind, reason=reason)


def _passing(items: list[Item], holds: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a subset, as large as possible, that holds together: bisect, then join the halves that pass."""
    if not items or holds(items):
        return items
    if len(items) == 1:
        return []
    middle = len(items) // 2
    first, second = _passing(items[:middle], holds), _passing(items[middle:], holds)
    joined = first + second
    if not first or not second or holds(joined):
        return joined
    for item in second:  # each half passes alone: add those that fit
        if holds([*first, item]):
            first = [*first, item]
    return first


def _sample(survey: Survey, blocks: Sequence[Block], widths: Mapping[str, int]) -> Bools:
    """Return random channels to remove for the proof, at least one per block."""
    rng = np.random.default_rng(0)
    gone = (rng.permutation(block.units)[min(widths[block.name], block.units - 1) :] for block in blocks)
    return survey.dead(block.ids[units] for block, units in zip(blocks, gone, strict=True))


def _among(survey: Survey, blocks: Sequence[Block], dead: Bools) -> Bools:
    """Return the channels of `dead` that belong to the given blocks."""
    return np.asarray(dead & survey.dead(block.ids for block in blocks))
