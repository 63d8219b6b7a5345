"""Sources of an export: from the user's text or module to a module with example inputs."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import inspect
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from onnxgrail.errors import MissingExtraError, ModelError, OnnxGrailError, UsageError
from onnxgrail.exporting import hugging
from onnxgrail.exporting.subject import Shapes, Subject, check_module, quiet, subject, torch
from onnxgrail.machine.extras import install
from onnxgrail.machine.scripts import called, is_named

SPECS = "file.py:function, torchvision:NAME, timm:NAME-or-folder or transformers:NAME-or-folder"
PICTURE = (3, 224, 224)
FRAMES = 16  # frames of a video
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
NO_NET = "Fetch the weights where there is a network, or take --random-weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """The user's options for the source.

    Attributes:
        shapes: of random inputs.
        task: task of a transformers model; None for the class that it was saved from.
        random: use random weights.
        seed: seed of all random values.
    """

    shapes: Shapes
    task: str | None = None
    random: bool = False
    seed: int = 0


def find(spec: Any, inputs: Any, wish: Wish) -> Subject:
    """Return the given module, or the module that a text names, with example inputs.

    Raises:
        UsageError: the text has no known form.
        MissingExtraError: a package is not installed.
        ModelError: there is no such model, code raises, or inputs are not known.
    """
    with _drawn(wish.seed):
        if not isinstance(spec, str | os.PathLike):
            # Copied, because export sets evaluation mode and may change dtype and attention.
            return _given(type(spec).__name__, copy.deepcopy(spec), inputs, wish)
        text = os.fspath(spec)
        if inputs is not None:
            raise UsageError(
                "inputs are for a module that is given", hint="A file.py:function returns (module, inputs)"
            )
        kind, _, name = text.partition(":")
        if kind in HUBS and name:
            if wish.task and kind != "transformers":
                raise UsageError("--task is for transformers: models")
            with _weights_only():
                return HUBS[kind](name, wish)
        if not is_named(text):
            raise UsageError(f"{text!r} names no model", hint=f"Give {SPECS}")
        if wish.task or wish.random:
            raise UsageError("--task and --random-weights are for models of hubs")
        with called(text, ModelError) as made:
            module, inputs = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
            return _given(Path(text).name, module, inputs, wish)


def _given(name: str, module: Any, inputs: Any, wish: Wish) -> Subject:
    """Return a module with inputs that are given, derived from its kind, or random with given shapes."""
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile, which hides names and arguments
    check_module(name, module)
    if inputs is not None:
        if wish.shapes:
            raise UsageError(f"{name} has example inputs, so none are made", hint="Leave out --input-shapes")
        return subject(name, module, inputs)
    if hugging.is_hugging(module):
        return hugging.described(name, module, wish.shapes)
    if hasattr(module, "pretrained_cfg"):
        return _pictures(name, module, _timm_size(module), wish)
    if not wish.shapes:
        raise ModelError(f"{name}: inputs are not known", hint="Return (module, inputs), or give --input-shapes")
    return subject(name, module, {n: hugging.drawn(n, shape) for n, shape in wish.shapes.items()})


@contextlib.contextmanager
def _drawn(seed: int) -> Iterator[None]:
    """Seed the random generator in the context, and restore the caller's generator after it."""
    with torch().random.fork_rng(devices=[]):
        torch().manual_seed(seed)
        yield


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """Restrict torch.load to tensors, because a pickle from a hub could run code."""
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FORCED)
        if before is not None:
            os.environ[_FORCED] = before


# ---------------------------------------------------------------------------------------------------------------- hubs


def package(name: str) -> ModuleType:
    """Import a hub's package.

    Raises:
        MissingExtraError: it is not installed, or its import fails.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            hint = f"{install('export')} (or only: pip install {name})"
            raise MissingExtraError(f"{name}: models need {name}, which is not installed", hint=hint) from error
        # torchvision, for example, raises a RuntimeError with a torch version it was not built for.
        hint = f"Install a release of {name} that fits torch {torch().__version__}"
        raise MissingExtraError(f"{name} cannot be imported: {type(error).__name__}: {error}", hint=hint) from error


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn a hub's exceptions into a `ModelError` with one line."""
    try:
        with quiet(printed=False):  # keeps progress bars of downloads
            yield
    except OnnxGrailError:
        raise
    except Exception as error:
        away = isinstance(error, OSError) or "connect" in str(error).lower()
        text = _line(error)
        if isinstance(error, ImportError) and _root(error) is not error:  # transformers only logs the cause
            text += f" ({type(_root(error)).__name__}: {_line(_root(error))})"
        raise ModelError(f"cannot load {name}: {text}", hint=NO_NET if away else "") from error


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def _root(error: BaseException) -> BaseException:
    """Return the root cause of an error."""
    before = error.__cause__ or error.__context__
    return error if before is None else _root(before)


def _unknown(kind: str, name: str, known: Iterable[str]) -> ModelError:
    close = difflib.get_close_matches(name, list(known), n=3)
    hint = f"Close are {', '.join(close)}" if close else f"{kind}.list_models() lists the names"
    return ModelError(f"{kind} has no model {name!r}", hint=hint)


def _torchvision(name: str, wish: Wish) -> Subject:
    models = package("torchvision").models
    if name not in models.list_models():
        raise _unknown("torchvision.models", name, models.list_models())
    weights = models.get_model_weights(name)
    best = getattr(weights, "DEFAULT", None)
    with loading(f"torchvision:{name}"):
        # Without weights, some networks initialize theirs for minutes, or print that they will.
        module = models.get_model(name, **_chosen(models.get_model_builder(name), None if wish.random else best))
    crop = getattr(getattr(best, "transforms", None), "keywords", {}).get("crop_size", PICTURE[-1])
    side = tuple(crop) if isinstance(crop, tuple | list) else (crop, crop)
    if ".video." in type(module).__module__:
        return _pictures(f"torchvision:{name}", module, (3, FRAMES, *side), wish)
    if ".detection." in type(module).__module__:
        hint = "Export it with a file.py:function that wraps it"
        raise ModelError(f"torchvision:{name} takes lists of images, which have no place in a graph", hint=hint)
    return _pictures(f"torchvision:{name}", module, (3, *side), wish)


def _chosen(builder: Any, weights: Any) -> dict[str, Any]:
    """Return arguments of a model builder: random weights exclude pretrained weights of the backbone, too."""
    parts = weights is None and "weights_backbone" in inspect.signature(builder).parameters
    return {"weights": weights} | ({"weights_backbone": None} if parts else {})


def _timm(name: str, wish: Wish) -> Subject:
    timm = package("timm")
    known = name.partition(".")[0]
    wanted = name
    if ":" not in name and not timm.is_model(known):
        if not Path(name).expanduser().is_dir():
            raise _unknown("timm", name, timm.list_models())
        wanted = f"local-dir:{Path(name).expanduser()}"
    with loading(f"timm:{name}"):
        module = timm.create_model(wanted, pretrained=not wish.random, exportable=True)
    return _pictures(f"timm:{name}", module, _timm_size(module), wish)


def _timm_size(module: Any) -> tuple[int, ...]:
    config = module.pretrained_cfg
    size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
    return tuple(size or PICTURE)


def _pictures(name: str, module: Any, size: tuple[int, ...], wish: Wish) -> Subject:
    """Return a module with a single image input whose batch stays open."""
    made = subject(name, module, (torch().randn(2, *size),))
    key = next(iter(made.inputs))
    shapes = dict(wish.shapes)
    shape = shapes.pop(key, None)
    if shapes:
        raise UsageError(f"{name} has no input {', '.join(map(repr, shapes))}", hint=f"It has {key}")
    return made if shape is None else subject(name, module, (torch().randn(*shape),))


def _transformers(name: str, wish: Wish) -> Subject:
    library = package("transformers")
    with loading(f"transformers:{name}"):
        module, notes = hugging.load(library, name, task=wish.task, random=wish.random)
    return hugging.described(f"transformers:{name}", module, wish.shapes, notes)


HUBS = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}
