"""Odd files that travel: recipes, reports, statistics and the folders of runs, with the commands that read them."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from click.testing import CliRunner

from onnxgrail.cli import main
from onnxgrail.core import Recipe
from tests.mutation import odd, wire
from tests.mutation.cases import Case, Rng
from tests.mutation.protos import pick
from tests.mutation.seeds import SEEDS, data_of

MODELS = ("mlp", "attention")
RESUMED = ("compress", "m.onnx", "out.onnx", "--data", "d.npz", "--ratio=0.3", "--round-to", "1", "-q")
GOOD: Mapping[str, tuple[Any, ...]] = {
    "ratio": (0.3, 0.5, 0), "unit_ratio": (0.5,), "target_params": ("70%",), "selector": ("l2", "wanda", "canary"),
    "blocks": (["mlp"], "conv,mlp"), "reducer": ("prune", "fold"), "compensate": ("none", "grail", "best", "canary"),
    "samples": (4,), "batch_size": (2,), "seed": (1,), "ridge": (1e-3,), "round_to": (1, 8), "norms": ("all", "none"),
    "include": ("w.*",), "exclude": ("b",), "closed_loop": (False,), "providers": (["CPUExecutionProvider"],),
    "check": (True,), "min_cosine": (0.1,), "data": ("d.npz",), "held_out": (2, "d.npz"), "output": (None,),
    "fit": (["prior"], []), "quantize": ("none",), "cache_budget": ("1M",), "allocate": ("uniform", "depth", "flap"),
}  # fmt: skip
RAW = ("!!python/object/apply:os.system ['touch RAN']", "!!python/name:os.system", "a: &a [*a]", "ratio: !!float x",
       "ratio: 0.3\n---\nratio: 0.4", "\tratio: 0.3", "ratio: 0.3\r\nseed: 1\r\n", "? [a]\n: b", "{ratio: 0.3", "\0",
       "ratio: 2020-01-01", "seed: 0x10", "seed: !!binary aGk=", "blocks: !!set {mlp}", "data: !!str evil.py:f",
       "data: &d evil.py:f\nheld_out: *d", "&a ratio: &b 0.3", "ratio: 0.3 # x\n...", "'ratio': .3", "- " * 3000,
       "data: |\n  d.npz", "data: >-\n  evil.py:f", "ratio: 1_0", "seed: 1:30", "=: 1", "!!omap [ratio: 0.3]",
       "selector: *undefined", "%YAML 9.9\n---\nratio: 0.3", "#" * 9000, "ratio: " + "9" * 9000)  # fmt: skip


@cache
def kept(name: str) -> dict[str, Any]:
    """The report, the statistics and the folder of a complete run."""
    model = SEEDS[name]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "m.onnx").write_bytes(model.SerializeToString())
        np.savez(folder / "d.npz", **data_of(model))
        with contextlib.chdir(folder):
            for words in (("--save-stats", "s.npz"), ("--report", "r.json", "--held-out", "2"), ("--resume", "kept")):
                result = CliRunner().invoke(main, [*RESUMED, "--force", *words])
                assert result.exit_code == 0, result.output
        made = folder / "kept"
        files = {str(p.relative_to(made)): p.read_bytes() for p in made.rglob("*") if p.is_file()}
        return {
            "report": json.loads((folder / "r.json").read_text()),
            "stats": (folder / "s.npz").read_bytes(),
            "resume": files,
        }


def recipe(name: str, folder: Path, rng: Rng) -> Case:
    """A recipe as JSON or YAML, with odd values, odd keys, or broken as text."""
    del name
    suffix = pick((".yaml", ".yml", ".json"), rng)
    path = folder / f"r{suffix}"
    if suffix != ".json" and rng.random() < 0.15:
        path.write_text(pick(RAW, rng))
        return Case("recipe: raw", _apply(path.name, rng))
    some = [str(key) for key in rng.permutation(sorted(GOOD))[: rng.integers(1, 5)]]
    content: dict[str, Any] = {key: pick(GOOD[key], rng) for key in some}
    for _ in range(int(rng.choice([0, 1, 1, 2]))):
        content = odd.changed(content, rng)
    if rng.random() < 0.5:
        key = pick([field.name for field in fields(Recipe)] + ["data", "held_out", "output", "tokenizer"], rng)
        content[key if rng.random() < 0.7 else key.replace("_", "-")] = odd.value(rng)
    text = json.dumps(content) if suffix == ".json" else yaml.safe_dump(content, allow_unicode=True)
    path.write_bytes(_damaged(text.encode(), rng))
    return Case("recipe", _apply(path.name, rng))


def report(name: str, folder: Path, rng: Rng) -> Case:
    """A report with other parts: as a recipe, or read back and written as a page."""
    content = kept(name)["report"]
    parts = pick((("recipe", "calibration", "verification"), (), ("model", "blocks", "allocation", "timing")), rng)
    for _ in range(int(rng.choice([1, 1, 2, 4]))):
        content = odd.changed(content, rng, parts)
    text = json.dumps(content)
    (folder / "r.json").write_bytes(_damaged(text.encode(), rng))
    if rng.random() < 0.6:
        return Case("report", _apply("r.json", rng))
    return Case("report: page", ("read the report",), call=_page)


def _page() -> None:
    """Whatever a report that was read back can be asked for."""
    from onnxgrail import Report

    found = Report.from_json(Path("r.json").read_text(encoding="utf-8", errors="replace"))
    found.save(Path("out.html"))
    found.save(Path("out.json"))
    found.summary_rows()
    found.refusal_counts()
    found.outcome_counts()


def statistics(name: str, folder: Path, rng: Rng) -> Case:
    """Statistics with other numbers, other arrays or another head."""
    data = kept(name)["stats"]
    if rng.random() < 0.2:
        (folder / "s.npz").write_bytes(_damaged(data, rng, 1.0))
    else:
        (folder / "good.npz").write_bytes(data)
        with np.load(folder / "good.npz") as file:
            arrays = dict(file)
        (folder / "good.npz").unlink()
        np.savez(folder / "s.npz", **_other(arrays, rng))
    more = ((), ("--selector", "gram"), ("--ratio", "0.5"), ("--compensate", "grail"), ("--allocate", "flap"))
    return Case("statistics", (*RESUMED[:6], "--stats", "s.npz", "--round-to", "1", *pick(more, rng)))


def _other(arrays: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """Arrays of which one is gone, of another kind, or holds odd numbers; or a head that says something else."""
    key = pick(arrays, rng) if rng.random() < 0.6 else "head"
    if key == "head":
        head = odd.changed(json.loads(str(arrays["head"])), rng, ("entries",))
        return {**arrays, "head": np.array(json.dumps(head))}
    array = np.array(arrays[key])
    if rng.random() < 0.1:
        return {other: held for other, held in arrays.items() if other != key}
    if array.dtype.kind == "f" and rng.random() < 0.5:
        array.flat[int(rng.integers(array.size))] = pick((np.nan, np.inf, -1e300, -1.0, 0.0), rng)
        return {**arrays, key: array}
    others = (array[:1], array[..., None], array.T * -1, np.zeros(0), array.astype(np.int64), array.astype("U9"),
              np.array([{}], dtype=object), array.astype(complex), np.array(3.0), array * np.nan, array * 0,
              array.astype(np.float16), np.zeros((10**4, 3)))  # fmt: skip
    return {**arrays, key: pick(others, rng)}


def resumed(name: str, folder: Path, rng: Rng) -> Case:
    """The folder of a run with another manifest, or with other steps."""
    files = dict(kept(name)["resume"])
    for path in ("manifest.json", pick([path for path in files if path.startswith("steps")], rng)):
        if path is None or rng.random() < 0.3:
            continue
        if path == "manifest.json" and rng.random() < 0.7:
            files[path] = json.dumps(odd.changed(json.loads(files[path]), rng)).encode()
        else:
            files[path] = _damaged(files[path], rng, 1.0)
    for path, data in files.items():
        (folder / "kept" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "kept" / path).write_bytes(data)
    return Case("resume", (*RESUMED, "--resume", "kept"), own=("kept",))


def _damaged(data: bytes, rng: Rng, share: float = 0.15) -> bytes:
    """Sometimes broken as bytes."""
    if rng.random() >= share or not data:
        return data
    return bytes(pick((wire.flipped, wire.overwritten, wire.truncated, wire.cut_out, wire.repeated), rng)(data, rng))


def _apply(path: str, rng: Rng) -> tuple[str, ...]:
    data = pick(((), ("--data", "d.npz"), ("--data", "d.npz")), rng)
    return ("apply", path, "m.onnx", *pick((("out.onnx",), ("--dry-run",)), rng), *data)
