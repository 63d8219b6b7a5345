"""Runs of two models on the same feeds, to compare their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.next_token import predicted
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.calibration.runtime.session import USUAL, Setup, open_session
from onnxgrail.fidelity import Tally, clues_of
from onnxgrail.fidelity.goals import Goals
from onnxgrail.graph.io.serial import Packed
from onnxgrail.graph.rewrite.interface import Port, fit
from onnxgrail.machine.progress import Progress, silent

Source = Packed | bytes | str | Path


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
    total, looked = len(batches), texts and not batches.synthetic
    text: str | None = None
    with ExitStack() as stack:
        one, two = (stack.enter_context(open_session(model, setup)) for model in (pair.a, pair.b))
        for number, (feed, labels) in enumerate(batches.labelled()):
            progress("compare", number, total)
            wanted = one.run(feed)
            if number == 0:
                text = predicted(one, feed, wanted) if looked and labels is None else None
                known = looked and labels is None
                tally.clues = clues_of(feed, text=text, known=known, synthetic=batches.synthetic)
            goals = Goals(labels=labels, tokens=None if text is None else feed[text])
            got = two.run(fit(feed, pair.ports))
            single = all(array.ndim == 0 or len(array) == 1 for array in feed.values())
            tally.add(fit(wanted, pair.ports), got, mask=padding_mask(feed), goals=goals, single=single)
        progress("compare", total, total)
    return tally
