"""Files of calibration data, written the way other programs do."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np


def images(folder: Path, count: int) -> None:
    """Photographs of noise: `0.png` and so on."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(count)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def text(path: Path, lines: int = 20) -> None:
    """Lines of words that `tokenizer` knows."""
    rng = np.random.default_rng(lines)
    path.write_text("".join(" ".join(f"w{n}" for n in rng.integers(0, 90, 12)) + "\n" for _ in range(lines)))


def tokenizer(path: Path, names: list[str] | None = None) -> Path:
    """Write a tokenizer of words: padding 0, unknown words 1, then the names."""
    words = ["[PAD]", "[UNK]", *(names or [f"w{n}" for n in range(90)])]
    model = {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}, "unk_token": "[UNK]"}
    added = [
        {
            "id": n,
            "content": w,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, w in enumerate(words[:2])
    ]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def polygraphy(path: Path, feeds: list[dict[str, Any]]) -> None:
    """Write a file as `polygraphy run --save-inputs` does."""

    def encoded(array: Any) -> dict[str, str]:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return {"array": base64.b64encode(file.getvalue()).decode(), "polygraphy_class": "ndarray"}

    path.write_text(json.dumps([{name: encoded(array) for name, array in feed.items()} for feed in feeds]))


def dataset(folder: Path, columns: dict[str, list[Any]], *, files: int = 1, float32: bool = False) -> None:
    """Write a folder as `Dataset.save_to_disk` does: Arrow streams and a file that names them."""
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if float32:
        kind = pa.float32()
        for _ in range(3):
            kind = pa.list_(kind)
        table = table.cast(pa.schema([pa.field(name, kind) for name in columns]))
    names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    edges = np.linspace(0, table.num_rows, files + 1).astype(int)
    for name, start, stop in zip(names, edges[:-1], edges[1:], strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(start, stop - start))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def characters(path: Path, alphabet: dict[str, int]) -> Path:
    """Write a tokenizer of single characters."""
    tokenizer(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["added_tokens"] = []
    whole["model"] = {"type": "WordLevel", "vocab": alphabet, "unk_token": next(iter(alphabet))}
    whole["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path
