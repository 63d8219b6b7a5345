"""The subjects of the bench: a model, the kinds of blocks to narrow, its data, and the metric of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
INNER = ("mlp", "heads")
MINILM_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model with a choice of blocks.

    Attributes:
        metric: name of the result of `judge`; for `accuracy` high is good, for all others low is good.
        calibration: unlabeled samples; each split uses half of them.
        feed: the batch on which latency is measured.
        judge: returns the metric of a file on held-out data.
        onnxsim: compare with onnxsim, which has no choice of blocks.
    """

    name: str
    model: Path
    blocks: tuple[str, ...]
    metric: str
    calibration: Arrays
    feed: Arrays
    judge: Callable[[Path], float]
    onnxsim: bool

    @property
    def sha256(self) -> str:
        """Return the checksum of the model file, which detects results of another file."""
        return hashlib.sha256(self.model.read_bytes()).hexdigest()


def session(path: Path) -> Any:
    """Open an ONNX Runtime session on one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # hides warnings about shapes in files of other tools
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def arrays(path: Path) -> Arrays:
    """Load all arrays of an npz file."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def embedded(model: str, blocks: tuple[str, ...], *, onnxsim: bool) -> Subject:
    """Return the subject of an embedded model."""
    from onnxgrail import models

    files = models.load(model)

    def judge(path: Path) -> float:
        runner = session(path)
        return float(models.score(files, lambda feed: runner.run(None, feed)))

    heldout = arrays(files.heldout)
    return Subject(
        name="-".join((model, *blocks)),
        model=files.model,
        blocks=blocks,
        metric=files.metric,
        calibration=arrays(files.calibration),
        feed={key: value[:8] for key, value in heldout.items() if key != "labels"},
        judge=judge,
        onnxsim=onnxsim,
    )


def minilm() -> Subject:
    """Return the sentence encoder of `bench/minilm.py`: 1 - cosine between its embeddings and those of the dense model.

    Needs the extras `cpu` and `torch`, transformers, and a download on the first call.
    """
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # those scripts import each other by name
    import minilm as script
    import minilm_export
    import minilm_text

    work = (minilm_export.DEFAULT_CACHE / "minilm").expanduser()
    model = minilm_export.ensure(work, forms=("dynamo",))["dynamo"]
    texts = minilm_text.ensure(work)
    calibration, heldout = (arrays(texts[split]) for split in minilm_text.SPLITS)
    mask = heldout["attention_mask"]

    def embed(path: Path) -> Any:
        return script.embeddings(script.hidden_states(session(path), heldout), mask)

    reference = embed(model)

    def judge(path: Path) -> float:
        return float(1.0 - np.sum(embed(path).astype(np.float64) * reference, axis=1).mean())

    feed = {key: value[:MINILM_BATCH] for key, value in heldout.items()}
    return Subject(
        name="-".join(("minilm", *INNER)),
        model=model,
        blocks=INNER,
        metric="1 - cosine",
        calibration=calibration,
        feed=feed,
        judge=judge,
        onnxsim=False,
    )


EMBEDDED: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    # The last column: onnxsim narrows the same layers as the first choice of blocks of each model.
    ("digits_resnet", ("conv",), True),
    ("digits_resnet", ("conv", "stream"), False),
    ("digits_vit", ("mlp",), True),
    ("digits_vit", INNER, False),
    ("char_llama", ("mlp",), True),
    ("char_llama", INNER, False),
)
SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    **{"-".join((model, *blocks)): partial(embedded, model, blocks, onnxsim=sim) for model, blocks, sim in EMBEDDED},
    "minilm-mlp-heads": minilm,
}
DEFAULT = tuple(name for name in SUBJECTS if not name.startswith("minilm"))
