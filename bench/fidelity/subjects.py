"""What is compressed: a model, the kinds of blocks that are narrowed, its data, and how a file is judged."""

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
    """One model with one choice of blocks.

    Attributes:
        metric: name of what `judge` returns; `accuracy` is better when high, everything else when low.
        calibration: unlabelled samples, of which every draw takes half.
        feed: the batch on which latency is measured.
        judge: held-out quality of a file.
        onnxsim: whether onnxsim's rows belong here: it takes no choice of blocks.
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
        """Digest of the model file: cells of another file are not cells of this subject."""
        return hashlib.sha256(self.model.read_bytes()).hexdigest()


def session(path: Path) -> Any:
    """A plain session of ONNX Runtime on one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # shapes noted in a file by others are not this bench's to complain about
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def arrays(path: Path) -> Arrays:
    """All arrays of an npz file."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def embedded(model: str, blocks: tuple[str, ...], *, onnxsim: bool) -> Subject:
    """A model that travels with the package."""
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
    """The sentence encoder of `bench/minilm.py`: 1 - cosine between its embeddings and those of the dense model.

    Needs the extras `cpu` and `torch`, transformers, and a download on the first call.
    """
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # those scripts import each other by bare name
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
    # The last column: what onnxsim narrows is what the first choice of blocks of each model narrows.
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
