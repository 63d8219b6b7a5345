"""Folders with exported models, as Optimum, transformers.js and ONNX Runtime GenAI write and load them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds import kinds
from onnxgrail.calibration.feeds.reading import TOKENIZER
from onnxgrail.errors import ModelError, OutputError
from onnxgrail.graph.io.model_file import beside
from onnxgrail.machine.files.paths import write_whole

FORMS = re.compile(r"_(quantized|fp16|int8|uint8|q8|q4|q4f16|bnb4)$")
"""Ends of the names that transformers.js gives to other number formats of a graph."""
FOREIGN = frozenset({".bin", ".safetensors", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".tflite", ".gguf"})
"""Suffixes of the weights of other frameworks, which hold the model at its full size."""
PROCESSOR = "preprocessor_config.json"
CONFIGS = ("generation_config.json", "config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The files of a folder, relative to it.

    Attributes:
        root: the folder.
        graphs: the models to compress.
        weights: the files with weights of each model; a model may name others, outside of the folder.
        forms: models in another number format, each with the one that is compressed.
        foreign: files that hold the model at its full size for another framework.
        others: files that are copied as they are.
    """

    root: Path
    graphs: tuple[Path, ...]
    weights: Mapping[Path, tuple[Path, ...]]
    forms: Mapping[Path, Path]
    foreign: tuple[Path, ...]
    others: tuple[Path, ...]

    def encoder(self) -> Path | None:
        """Return the graph that reads the input of the others; None if there is no such graph."""
        found = [graph for graph in self.graphs if graph.stem.startswith("encoder")]
        return self.root / found[0] if len(found) == 1 and len(self.graphs) > 1 else None

    def start(self) -> int | None:
        """Return the token with which a decoder begins a text; None if no configuration tells."""
        for name in CONFIGS:
            with contextlib.suppress(ModelError):
                found = _read(self.root / name).get("decoder_start_token_id")
                if isinstance(found, int):
                    return found
        return None

    def settings(self, *sources: Any) -> dict[str, Any]:
        """Return how data of these sources are read: the tokenizer and what the image processor does, where they apply.

        Raises:
            ModelError: the configuration of the image processor is broken.
        """
        wanted = frozenset[str]().union(*map(kinds.takes, sources))
        found: dict[str, Any] = {}
        if "tokenizer" in wanted and (self.root / TOKENIZER).is_file():
            found["tokenizer"] = self.root / TOKENIZER
        if "image_mean" in wanted and (self.root / PROCESSOR).is_file():
            stated = _read(self.root / PROCESSOR)
            found |= _scale(stated)
            if form := _form(stated):
                found["image_form"] = form
        return found

    def left_out(self, graphs: Collection[Path]) -> dict[Path, str]:
        """Return the files that are not copied where these graphs stay as they are, with the reasons."""
        forms = (file for file, graph in self.forms.items() if graph not in graphs)
        found = dict.fromkeys(forms, "another number format of a model that is compressed")
        return found | dict.fromkeys(self.foreign, "the weights of another framework")

    def copy(self, target: Path, graphs: Collection[Path]) -> None:
        """Copy the files that stay as they are, and these graphs with their weights and their other number formats.

        Raises:
            OutputError: a file cannot be read or written.
        """
        whole = [*graphs, *(file for file, graph in self.forms.items() if graph in graphs)]
        weights = [file for graph in whole for file in self.weights[graph]]
        for file in dict.fromkeys((*self.others, *weights, *whole)):
            try:
                with (self.root / file).open("rb") as source:
                    write_whole(target / file, partial(shutil.copyfileobj, source))
            except OSError as error:
                raise OutputError(f"cannot copy {str(file)!r}: {error.strerror or error}") from error


def exported_of(root: Path) -> Exported:
    """Return the files of a folder; hidden ones, and links to files elsewhere, are not among them.

    Raises:
        ModelError: there is no graph.
    """
    files = sorted(_files(root))
    models = [file for file in files if file.suffix == ".onnx"]
    forms = {file: file.with_stem(FORMS.sub("", file.stem)) for file in models if FORMS.search(file.stem)}
    forms = {file: graph for file, graph in forms.items() if graph in models}
    graphs = tuple(file for file in models if file not in forms)
    if not graphs:
        raise ModelError(f"folder {str(root)!r} has no .onnx file", hint="Give an exported folder, or an .onnx file")
    named = {graph: set(beside(root / graph)) for graph in models}
    weights = {graph: tuple(file for file in files if root / file in some) for graph, some in named.items()}
    known = {*models, *(file for some in weights.values() for file in some)}
    foreign = tuple(file for file in files if file.suffix in FOREIGN and file not in known)
    others = tuple(file for file in files if file not in {*known, *foreign})
    return Exported(root=root, graphs=graphs, weights=weights, forms=forms, foreign=foreign, others=others)


def _files(root: Path) -> Iterator[Path]:
    """Yield regular files; a link counts if it leads into the folder, or to the folder of the graphs' real files."""
    inside = root.resolve()
    stores = {graph.resolve().parent for graph in root.rglob("*.onnx")}  # the cache of a hub consists of links
    for path in root.rglob("*"):
        real, name = path.resolve(), path.relative_to(root)
        ours = real.is_relative_to(inside) or real.parent in stores
        if path.is_file() and ours and not any(part.startswith(".") for part in name.parts):
            yield name


def _scale(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return mean and deviation of pixels in 0..1 that amount to what an image processor does with those in 0..255."""
    normal = stated.get("do_normalize", True)
    found = {name: stated[name] for name in ("image_mean", "image_std") if normal and name in stated}
    factor = stated.get("rescale_factor", 1 / 255) if stated.get("do_rescale", True) else 1.0
    if not isinstance(factor, int | float) or not factor > 0 or math.isclose(255 * factor, 1, rel_tol=1e-3):
        return found
    whole = {"image_mean": 0.0, "image_std": 1.0} | found
    try:
        return {name: (np.asarray(value, np.float64) / (255 * factor)).tolist() for name, value in whole.items()}
    except (TypeError, ValueError):  # no numbers, which are refused by their names later
        return found


def _form(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the form of images that an image processor makes, in the words of `--image-form`."""
    size, turned = stated.get("size"), bool(stated.get("do_flip_channel_order"))
    whole = isinstance(size, int) or (isinstance(size, Mapping) and {"height", "width"} <= size.keys())
    stretched = whole and stated.get("do_resize", True) and not stated.get("do_center_crop")
    return (*(["bgr"] * turned), *(["stretch"] * bool(stretched)))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {str(path)!r}: {error}", hint="Export the folder again") from error
    return found if isinstance(found, dict) else {}
