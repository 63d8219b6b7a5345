"""Runs of two models on the same feeds, to compare their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.next_token import predicted
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.fidelity import Tally, clues_of
from onnxgrail.fidelity.goals import Goals
from onnxgrail.graph.io.serial import Packed
from onnxgrail.graph.rewrite.interface import Port, fit
from onnxgrail.machine.progress import Progress, silent


def run_both(
    a: Packed | bytes | str | Path,
    b: Packed | bytes | str | Path,
    batches: Batches,
    *,
    ports: Sequence[Port] = (),
    providers: Sequence[str] = ("CPUExecutionProvider",),
    once: bool = False,
    texts: bool = False,
    sizes: Mapping[str, int] | None = None,
    judge: bool = True,
    progress: Progress = silent,
) -> Tally:
    """Run two models on all batches and compare every output; padded tokens are left out.

    Args:
        a: the reference.
        b: the model that is judged.
        batches: the feeds of both.
        ports: inputs and outputs of `a` that `b` lacks or has narrower; the rest is fed and compared.
        providers: ONNX Runtime execution providers.
        once: run the models as they are, so that weights in external files are not copied.
        texts: test if the model predicts tokens of the feeds, which costs a run of `a`.
        sizes: as in `open_session`, of both.
        judge: also judge every output by the measure that suits it, not only by distances.
        progress: called once per feed.
    """
    tally = Tally(judge=judge)
    total, looked = len(batches), texts and not batches.synthetic
    text: str | None = None
    common: dict[str, Any] = {"providers": providers, "optimise": not once, "once": once, "sizes": sizes}
    with ExitStack() as stack:
        one, two = (stack.enter_context(open_session(model, **common)) for model in (a, b))
        for number, (feed, labels) in enumerate(batches.labelled()):
            progress("compare", number, total)
            wanted = one.run(feed)
            if number == 0:
                text = predicted(one, feed, wanted) if looked and labels is None else None
                known = looked and labels is None
                tally.clues = clues_of(feed, text=text, known=known, synthetic=batches.synthetic)
            goals = Goals(labels=labels, tokens=None if text is None else feed[text])
            got = two.run(fit(feed, ports))
            tally.add(fit(wanted, ports), got, mask=padding_mask(feed), goals=goals)
        progress("compare", total, total)
    return tally
