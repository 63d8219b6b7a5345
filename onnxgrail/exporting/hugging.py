"""Checkpoints of transformers: loaded in the class they were saved from, with inputs made from their configuration."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from onnxgrail.errors import ModelError, UsageError
from onnxgrail.exporting.axes import BATCH, SEQUENCE
from onnxgrail.exporting.subject import Shapes, Subject, Tensor, subject, torch

TASKS = {
    "feature-extraction": "AutoModel",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "image-segmentation": "AutoModelForSemanticSegmentation",
    "object-detection": "AutoModelForObjectDetection",
    "depth-estimation": "AutoModelForDepthEstimation",
    "audio-classification": "AutoModelForAudioClassification",
    "speech-recognition": "AutoModelForSpeechSeq2Seq",
    "speech-ctc": "AutoModelForCTC",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
}
ROWS, LENGTH, SAMPLES = 2, 8, 16000  # sizes of example inputs: samples, tokens, audio samples
OWN_CODE = "Code of checkpoints is not run; read it, and export through a file.py:function of yours"


def load(library: ModuleType, name: str, *, task: str | None, random: bool) -> tuple[Any, tuple[str, ...]]:
    """Load a model; return it with notes.  A local folder is read without network access.

    Args:
        library: the transformers package.
        name: a folder or a name of the hub.
        task: a key of `TASKS`; None for the class that the checkpoint was saved from.
        random: make random weights.

    Raises:
        ModelError: no such folder, or the model contains its own code.
        UsageError: an unknown task.
    """
    if task is not None and task not in TASKS:
        raise UsageError(f"unknown task {task!r}", hint=f"Choose from {', '.join(TASKS)}")
    folder = Path(name).expanduser()
    if not folder.is_dir() and re.match(r"[.~/]|.*/.*/", name):
        raise ModelError(f"no folder {name!r}", hint="Give a folder of save_pretrained, or a name of the hub")
    source = str(folder) if folder.is_dir() else name
    common = {"trust_remote_code": False, "local_files_only": folder.is_dir()}
    with _quiet(library):
        try:
            config = library.AutoConfig.from_pretrained(source, **common)
        except ValueError as error:
            raise ModelError(f"cannot load {name}: {str(error).splitlines()[0]}", hint=OWN_CODE) from error
        if hasattr(config, "use_cache"):
            config.use_cache = False
        kind = _class(library, config, task)
        if random:
            made = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
            return made, ("weights are random",)
        module, told = kind.from_pretrained(source, config=config, output_loading_info=True, **common)
    missing = sorted(told.get("missing_keys") or ())
    few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return module, (f"weights not in the checkpoint are random: {few}",) if missing else ()


def _class(library: ModuleType, config: Any, task: str | None) -> Any:
    """Return the auto class of a task; else the class that the checkpoint was saved from; else AutoModel."""
    if task is not None:
        return getattr(library, TASKS[task])
    for name in getattr(config, "architectures", None) or ():
        if isinstance(getattr(library, name, None), type):
            return getattr(library, name)
    return library.AutoModel


@contextlib.contextmanager
def _quiet(library: ModuleType) -> Iterator[None]:
    """Suppress progress bars and tables while loading; the notes hold all that matters."""
    log = library.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def is_hugging(module: Any) -> bool:
    """Return True if a module is a transformers model."""
    return hasattr(module, "config") and hasattr(module, "main_input_name") and hasattr(module, "from_pretrained")


def described(name: str, module: Any, shapes: Shapes, notes: tuple[str, ...] = ()) -> Subject:
    """Return a model as a subject, with inputs that fit its configuration.

    Args:
        name: its name in messages.
        module: the model.
        shapes: shapes of inputs, in place of those from the configuration.
        notes: notes on how the model was loaded.

    Raises:
        ModelError: its inputs are of an unknown kind.
        UsageError: a shape is given for an input that it does not have.
    """
    if hasattr(module, "set_experts_implementation"):
        with contextlib.suppress(Exception):  # fails without experts; loops over experts would depend on the data
            module.set_experts_implementation("batched_mm")
    parameters = inspect.signature(module.forward).parameters
    inputs, axes = _examples(module, parameters)
    if not inputs:
        hint = "Write a file.py:function that returns (module, inputs)"
        raise ModelError(f"{name}: inputs for {type(module).__name__} are not known", hint=hint)
    for key, shape in shapes.items():
        if key not in inputs:
            raise UsageError(f"{name} has no input {key!r}", hint=f"It has {', '.join(inputs)}")
        inputs[key] = drawn(key, shape, _vocabulary(module.config)) if "mask" not in key else _mask(*shape)
    fixed = {key: value for key, value in (("use_cache", False), ("return_dict", True)) if key in parameters}
    return subject(name, module, {**inputs, **fixed}, axes=axes, notes=notes)


def drawn(name: str, shape: tuple[int, ...], vocabulary: int = 2) -> Tensor:
    """Return random values for an input: ids and masks by their names, else normal values."""
    if re.search(r"mask", name):
        return torch().ones(shape, dtype=torch().int64)
    if re.search(r"(^|_)ids?($|_)|token|label", name):
        return torch().randint(0, vocabulary, shape)
    return torch().randn(shape)


def _examples(module: Any, takes: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """Return inputs by name, and their open axes."""
    config, main = module.config, module.main_input_name
    inputs: dict[str, Tensor] = {}
    axes: dict[str, dict[int, str]] = {}

    def add(key: str, tensor: Tensor, *labels: str) -> None:
        inputs[key], axes[key] = tensor, dict(enumerate((BATCH, *labels)))

    if main == "input_ids" or ("input_ids" in takes and "pixel_values" in takes):
        length = _length(config)
        add("input_ids", drawn("input_ids", (ROWS, length), _vocabulary(config)), SEQUENCE)
        if "attention_mask" in takes:
            add("attention_mask", _mask(ROWS, length), SEQUENCE)
        if "token_type_ids" in takes and getattr(config, "type_vocab_size", 0) > 1:
            add("token_type_ids", torch().zeros(ROWS, length, dtype=torch().int64), SEQUENCE)
    if main == "pixel_values" or (inputs and "pixel_values" in takes):
        add("pixel_values", torch().randn(ROWS, *_picture(config)))
    if main == "input_values":
        add("input_values", torch().randn(ROWS, SAMPLES), "samples")
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        add("input_features", torch().randn(ROWS, getattr(config, "num_mel_bins", 80), frames))
    if inputs and getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        ids = drawn("decoder_input_ids", (ROWS, _length(config) - 1), _vocabulary(config))
        add("decoder_input_ids", ids, "decoder_sequence")
    return inputs, axes


def _mask(rows: int, length: int) -> Tensor:
    """Return a mask in which one token is padding, so that the mask affects the outputs."""
    mask = torch().ones(rows, length, dtype=torch().int64)
    if length > 1:
        mask[-1, -1] = 0
    return mask


def _part(config: Any, name: str, default: Any) -> Any:
    """Return an entry of the configuration, or of its part for text or images."""
    for place in (config, *(getattr(config, key, None) for key in ("text_config", "vision_config"))):
        found = getattr(place, name, None)
        if found is not None:
            return found
    return default


def _vocabulary(config: Any) -> int:
    return int(_part(config, "vocab_size", 2))


def _length(config: Any) -> int:
    """Return a sequence length, small enough that other lengths fit, too."""
    return max(2, min(LENGTH, int(_part(config, "max_position_embeddings", 2 * LENGTH)) // 2))


def _picture(config: Any) -> tuple[int, ...]:
    size = _part(config, "image_size", 224)
    if isinstance(size, Mapping):
        size = tuple(size.values())[:2]
    side = tuple(size) if isinstance(size, tuple | list) else (size, size)
    return int(_part(config, "num_channels", 3)), *(math.ceil(number) for number in side)
