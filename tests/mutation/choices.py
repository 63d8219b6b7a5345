"""One case by its number: a file that travels, or an option, that is odd, and the command that meets it.

`evil.py` and the plug-in `canary` leave a file where they are run, which nothing but the command line may have done.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from onnxgrail.cli import main
from onnxgrail.recipe import selection
from onnxgrail.recipe.choices import Options
from tests.mutation import odd
from tests.mutation.cases import Case, Rng
from tests.mutation.protos import pick
from tests.mutation.seeds import SEEDS, data_of
from tests.mutation.travelling import GOOD, MODELS, kept, recipe, report, resumed, statistics

CANARY = "open('RAN', 'w').close()\ndef f():\n    yield {}\n"
OUTPUTS = ("out.json", "out.html", "out.yaml", "out.npz", "out.onnx", "out.x/r.json", "d.npz", "m.onnx", "good.json",
           ".", "..", "folder", "n" * 300 + ".json", "d.npz/r.json", "r.yaml")  # fmt: skip
PATHS = frozenset({"output", "out", "report", "save_stats", "save_recipe", "page"})
NAMED = frozenset({"data", "held_out"})  # what runs `file.py:function` where a command names it
BEGINNINGS = {
    "compress": ("m.onnx", "out.onnx", "--data", "d.npz"),
    "apply": ("r.yaml", "m.onnx", "--dry-run"),
    "compare": ("m.onnx", "m.onnx"),
    "bench": ("m.onnx", "--rounds", "2"),
}
COMMANDS = ("compress", "compress", "compress", "apply", "inspect", "compare", "bench")
SKIPPED = frozenset({"help", "help_all", "latency", "curves", "seconds", "target", "resume", "custom_ops"})
CALLS = ("compress", "compress", "apply", "inspect", "compare", "bench")


def case(seed: int, number: int, folder: Path) -> Case:
    """Write the files of a case to an empty folder; the same numbers give the same files, but for times."""
    rng = np.random.default_rng((seed, number))
    name = pick(MODELS, rng)
    model = SEEDS[name]()
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    np.savez(folder / "d.npz", **data_of(model))
    np.savez(folder.parent / "outside.npz", **data_of(model))
    (folder / "evil.py").write_text(CANARY)
    (folder / "folder").mkdir()
    (folder / "link.npz").symlink_to(folder.parent / "outside.npz")
    (folder / "evil.py:f").write_text("a file of that name")
    (folder / "linked.npz").symlink_to(folder / "evil.py:f")
    (folder / "good.json").write_text(json.dumps(kept(name)["report"]))
    make = pick(MAKERS, rng)
    found: Case = make(name, folder, rng)
    return found


def options(name: str, folder: Path, rng: Rng) -> Case:
    """A command with odd values of its options, whatever options it has."""
    del name
    (folder / "r.yaml").write_text("ratio: 0.5")
    command = pick(COMMANDS, rng)
    words = [command, *BEGINNINGS.get(command, ("m.onnx",))]
    every = [p for p in main.commands[command].params if isinstance(p, click.Option) and p.name not in SKIPPED]
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        option = pick(every, rng)
        words.append(pick([*option.opts, *option.secondary_opts], rng))
        if not option.is_flag:
            words.append(_text(option.name or "", rng))
    free = ("good.json",) if command == "apply" else ("good.json", "r.yaml")  # files that the command does not read
    return Case(f"options of {command}", tuple(words), own=free if "--force" in words else ())


def _text(option: str, rng: Rng) -> str:
    """A value as it stands on a command line."""
    if option in PATHS:
        return str(pick(OUTPUTS, rng))
    if option in GOOD and rng.random() < 0.3:
        found = pick([good for good in GOOD[option] if good != "canary"], rng)
        return ",".join(found) if isinstance(found, list) else str(found)
    pool = pick((odd.WORDS, odd.WORDS, odd.PATTERNS, odd.PLACES, odd.NUMBERS), rng)
    return str(pick([word for word in pool if "\0" not in str(word) and word != "canary"], rng))[:9000]


def keywords(name: str, folder: Path, rng: Rng) -> Case:
    """A call of the library with odd values of its keywords, whatever keywords it has."""
    del name, folder
    import onnxgrail

    function = pick(CALLS, rng)
    positional = {"apply": ({"ratio": 0.5}, "m.onnx"), "compare": ("m.onnx", "m.onnx")}.get(function, ("m.onnx",))
    settings: dict[str, Any] = {"rounds": 2} if function == "bench" else {}
    settings |= {"dry_run": True} if function in ("compress", "apply") else {}
    settings |= {"ratio": 0.3} if function == "compress" and rng.random() < 0.8 else {}
    parameters = inspect.signature(getattr(onnxgrail, function)).parameters.values()
    known = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    if function in ("compress", "apply"):
        known += [*Options.__annotations__, "output"]
    left_out = (*SKIPPED, "group", "progress", "dry_run", "rounds")
    known = sorted({word for word in known if word not in left_out})
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        word = pick(known, rng)
        settings = {**settings, word: _object(word, rng)}
    told = ", ".join(f"{word}={value!r:.60}" for word, value in settings.items())
    call = lambda: getattr(onnxgrail, function)(*positional, **settings)  # noqa: E731
    return Case(f"keywords of {function}", (f"{function}({told})",), call=call)


def _object(word: str, rng: Rng) -> Any:
    if word in GOOD and rng.random() < 0.3:
        return pick([good for good in GOOD[word] if good != "canary"], rng)
    if rng.random() < 0.3:
        return pick(odd.OBJECTS, rng)
    if word in PATHS or word in ("stats", "resume", "tokenizer"):
        return pick((*OUTPUTS, *odd.NUMBERS, [], {}, [3], [None], [["r"]], {"x": [8, 6]}), rng)
    found = odd.value(rng)
    return None if found in (*odd.CODE, "canary", ["evil.py:f"]) else found


MAKERS = (recipe, recipe, recipe, report, report, statistics, resumed, options, options, keywords, keywords)


def prepare(root: Path) -> None:
    """Install the plug-in `canary` for the process, and run what all cases begin with."""
    site = root / "site"
    shutil.rmtree(site, ignore_errors=True)
    (site / "canary-1.0.dist-info").mkdir(parents=True)
    (site / "canary-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: canary\nVersion: 1.0\n")
    groups = "".join(f"[onnxgrail.{group}]\ncanary = canary:f\n" for group in ("selectors", "compensators"))
    (site / "canary-1.0.dist-info" / "entry_points.txt").write_text(groups)
    (site / "canary.py").write_text(CANARY)
    sys.path.append(str(site))
    selection.SECONDS = 1.0
    for name in MODELS:
        kept(name)
