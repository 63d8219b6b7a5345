"""The models of the bench: their networks, samples, and how outputs are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.published import readers, transformer
from bench.published.page import OURS
from bench.published.transformer import Array, Ints, Net
from onnxgrail import models
from onnxgrail.fidelity.sums import log_softmax

Floats = npt.NDArray[np.float64]
Feed = dict[str, npt.NDArray[Any]]
Choices = Mapping[str, Mapping[str, Any]]
SEQUENCES = 64  # that calibrate the sentence encoder


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with calibration and held-out samples.

    Attributes:
        sizes: of the whole file, that all methods get.
        alone: rows of the default with fewer ways, by name.
        without: why a method cannot run, by name.
        read: returns what the network in numpy takes for samples of the file.
        lost: returns sums and counts by sample, (n, 2), of first outputs, those of the dense network, and the samples.
        value: returns the measure of sums (..., 2); low is good.
    """

    name: str
    measure: str
    model: Path
    net: Net
    sizes: tuple[str, ...]
    calibration: Feed
    heldout: Feed
    lost: Callable[[Array, Array, Feed], Floats]
    value: Callable[[Floats], Floats]
    read: Callable[[Feed], Array | Ints] = lambda feed: next(iter(feed.values()))
    alone: Choices = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)

    def judged(self, run: Callable[[Feed], Array], *, heldout: bool = True) -> Floats:
        """Return the sums and counts by sample of what gives the first output for samples."""
        feed = self.heldout if heldout else self.calibration
        return self.lost(run(feed), self.dense[heldout], feed)

    def network(self, net: Net) -> Callable[[Feed], Array]:
        """Return the function that gives the outputs of a network in numpy."""
        return lambda feed: transformer.outputs(net, self.read(feed))

    @cached_property
    def dense(self) -> tuple[Array, Array]:
        """Return the outputs of the dense network for calibration and held-out samples."""
        run = self.network(self.net)
        return run(self.calibration), run(self.heldout)


def narrow(*kinds: tuple[str, ...]) -> Choices:
    """Return rows of the default with these blocks only."""
    return {f"{OURS}, `--blocks {','.join(blocks)}`": {"blocks": blocks} for blocks in kinds}


def ratio(sums: Floats) -> Floats:
    """Return the mean of sums and counts."""
    return np.asarray(sums[..., 0] / sums[..., 1])


def embedded(name: str, reader: Callable[[Path], Net], **choices: Any) -> Subject:
    """Return an embedded model with its samples; the choices are what else `Subject` needs."""
    found = models.load(name)
    return Subject(
        name=found.name,
        model=found.model,
        net=reader(found.model),
        sizes=("70%", "50%", "30%"),
        calibration=arrays(found.calibration),
        heldout=arrays(found.heldout),
        alone=narrow(("mlp", "heads"), ("stream",)),
        **choices,
    )


def char_llama() -> Subject:
    """Return the embedded language model: perplexity of the next characters."""

    def lost(logits: Array, _: Array, feed: Feed) -> Floats:
        labels = feed.get("labels")
        if labels is None:  # calibration samples are judged by their own next characters
            logits, labels = logits[:, :-1], feed["input_ids"][:, 1:]
        surprise = -np.take_along_axis(log_softmax(logits.astype(np.float64)), labels[..., None], axis=-1)[..., 0]
        return np.stack([surprise.sum(axis=1), np.full(len(labels), labels.shape[1])], axis=1)

    def value(sums: Floats) -> Floats:
        return np.asarray(np.exp(ratio(sums)))

    return embedded("char_llama", readers.llama, measure="perplexity", lost=lost, value=value)


def digits_vit() -> Subject:
    """Return the embedded image classifier: total variation between its probabilities and those of the dense model."""

    def lost(logits: Array, dense: Array, _: Feed) -> Floats:
        ours, theirs = (np.exp(log_softmax(values.astype(np.float64))) for values in (logits, dense))
        return counted(50 * np.abs(ours - theirs).sum(axis=1))

    return embedded(
        "digits_vit",
        readers.vit,
        measure="total variation",
        lost=lost,
        value=ratio,
        read=lambda feed: readers.patches(feed["images"]),
    )


def minilm(model: Path, calibration: Path, heldout: Path) -> Subject:
    """Return the sentence encoder: 1 - cosine between sentence embeddings and those of the dense model, in ‰."""
    samples = {name: array[:SEQUENCES] for name, array in arrays(calibration).items()}
    assert samples["attention_mask"].all(), "sequences must be full: the network in numpy has no mask"

    def lost(states: Array, dense: Array, _: Feed) -> Floats:
        return counted(1000 * (1 - (sentences(states) * sentences(dense)).sum(axis=1)))

    return Subject(
        name="minilm",
        measure="1 - cosine",
        model=model,
        net=readers.bert(model),
        sizes=("85%", "75%", "65%"),
        calibration=samples,
        heldout=arrays(heldout),
        lost=lost,
        value=ratio,
        alone=narrow(("mlp", "heads")),
        without=dict.fromkeys(("SliceGPT", "SliceGPT, one rotation"), POSTNORM),
    )


POSTNORM = "the paper's rotation needs norms before the matrices, to fold their scales; here they come after the sums"


def sentences(states: Array) -> Floats:
    """Return sentence embeddings of full sequences: means over tokens with unit length."""
    mean = states.astype(np.float64).mean(axis=1)
    return np.asarray(mean / np.linalg.norm(mean, axis=1, keepdims=True))


def counted(values: Floats) -> Floats:
    """Return values with the count 1 each."""
    return np.stack([values, np.ones(len(values))], axis=1)


def arrays(path: Path) -> Feed:
    """Load all arrays of an npz file."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
