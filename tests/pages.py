"""The pages in `docs/` as a reader meets them: blocks of code with their marks, run in order on the embedded models.

The line before a fence says what happens to it: `<!-- run -->`, `<!-- run: torch -->` where that extra is needed,
`<!-- run: exit 3 -->` where the last command ends with that code, `<!-- output -->` for what the block before it prints
(`<!-- output: numbers vary -->` where only the words must agree), and `<!-- not run: why -->`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from click.testing import CliRunner

from tests.furniture import FILES
from tests.shorter import short

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"(?:^(?P<mark><!--[^\n]*-->)\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
MARK = re.compile(r"<!-- (run(: torch|: exit [0-4])?|then(: torch)?|output(: numbers vary)?|not run: .+) -->")
COPIES = {"model": "digits_resnet", "vit": "digits_vit", "llama": "char_llama"}
SHARES = {"digits_resnet": 0.75, "digits_vit": 0.5, "char_llama": 0.75}  # what small copies lose; two heads stay

SAMPLES = 32
BRIEF = ["--samples", "64", "--budget-seconds", "2"]  # what is tested of a fit by gradient is that it runs


class Example(NamedTuple):
    language: str
    code: str
    mark: str
    line: int


def examples(text: str, first: int = 1) -> list[Example]:
    """The blocks of a page, or of a part of it that begins at line `first`."""
    return [
        Example(m["language"], m["code"], m["mark"] or "", first + text.count("\n", 0, m.start("language")))
        for m in FENCE.finditer(text)
    ]


def sections(text: str) -> list[tuple[str, list[Example]]]:
    """Headings of the second level with their blocks; what comes before the first one is called `top`."""
    found, first = [], 1
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        title = part.partition("\n")[0].removeprefix("## ") if part.startswith("## ") else "top"
        found.append((title, examples(part, first)))
        first += part.count("\n")
    return found


def commands(code: str) -> list[list[str]]:
    """The lines of a shell block, comments and continuation lines resolved."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@functools.cache
def small(source: str) -> bytes:
    """Return an embedded model with fewer units: a command then takes a quarter of the time on the ResNet.

    It is compensated, because its outputs would hardly depend on its input otherwise, and no gate would fail.
    """
    import onnxgrail

    model, data = (ROOT / "models" / "data" / f"{source}{end}" for end in (".onnx", ".calib.npz"))
    given = short(source) if source == "char_llama" else model
    plain = {"compensate": "grail", "selector": "l2", "allocate": "uniform", "held_out": 0, "check": False}
    choices: dict[str, Any] = {"data": data, "samples": 64, "unit_ratio": SHARES[source], "dry_run": True, **plain}
    narrow = ir.to_proto(onnxgrail.compress(given, **choices).model)
    del narrow.metadata_props[:]  # nothing tells that it was narrowed
    written: bytes = narrow.SerializeToString()
    return written


def furnish(folder: Path, blocks: Sequence[Example] = ()) -> None:
    """The embedded models under the names that pages use, and those other files that the code of a page names.

    Where a page tells no results, models are smaller and there are few samples: the commands are tested, no numbers.
    A loss that nothing meets is a result.
    """
    code = "\n".join(block.code for block in blocks)
    nothing = "<!-- run: exit 4 -->"
    shown = any(b.mark.startswith("<!-- output") or (b.mark == nothing and "--max-loss" in b.code) for b in blocks)
    most = None if shown else SAMPLES
    for name, source in COPIES.items():
        whole = ROOT / "models" / "data" / f"{source}.onnx"
        (folder / f"{name}.onnx").write_bytes(whole.read_bytes() if shown or name not in code else small(source))
        for there, here in (("calib", ""), ("heldout", ".heldout")):
            with np.load(ROOT / "models" / "data" / f"{source}.{there}.npz") as file:
                np.savez(folder / f"{name}{here}.npz", **{key: file[key][:most] for key in file.files})
    (folder / "model.npz").rename(folder / "calib.npz")
    (folder / "model.heldout.npz").rename(folder / "heldout.npz")
    (folder / "models").symlink_to(ROOT / "models")
    for name, write in FILES.items():
        if re.search(rf"\b{re.escape(name)}\b", code):
            write(folder / name)


def run(blocks: list[Example]) -> int:
    """Run the marked blocks one after another in the current folder; how many were run."""
    printed, count = "", 0
    for number, block in enumerate(blocks):
        where = f"line {block.line}"
        if block.mark == "<!-- run: torch -->" and importlib.util.find_spec("torch") is None:
            continue
        if block.mark.startswith("<!-- output"):
            assert words_of(block.code, block.mark) == words_of(printed, block.mark), f"{where}: it prints\n{printed}"
        elif block.mark.startswith("<!-- run"):
            count += 1
            if block.language == "python":
                exec(compile(block.code, where, "exec"), {"__name__": "__main__"})
            else:
                printed = shell(block, where, untold(blocks, number))
    return count


def untold(blocks: Sequence[Example], number: int) -> list[str]:
    """Return options of a short search for a block without output on a page with whole models, which shows others."""
    told = [one.mark.startswith("<!-- output") for one in blocks]
    return ["--effort", "fast"] if any(told) and not any(told[number + 1 : number + 2]) else []


def shell(block: Example, where: str, short: Sequence[str] = ()) -> str:
    """Run the commands of one block; what the last one prints.  Compressions take the options `short`, too."""
    from onnxgrail.cli import main

    code = re.search(r"exit (\d)", block.mark)
    lines = commands(block.code)
    printed = ""
    for words in lines:
        assert words[0] == "onnxgrail", f"{where}: only onnxgrail can be run here: {shlex.join(words)}"
        brief = BRIEF if block.mark == "<!-- run: torch -->" and "grasp" not in words else []
        search = short if words[1] == "compress" and "--effort" not in words else []
        done = CliRunner().invoke(main, [*words[1:], *brief, *search, *short_times(words)])
        wanted = int(code[1]) if code and words is lines[-1] else 0
        assert done.exit_code == wanted, f"{where}: {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        printed = done.stdout
    return printed


def short_times(words: Sequence[str]) -> list[str]:
    """Return options that let a command measure for a short time: what is tested is that it runs."""
    return ["--seconds", "0.2"] if "--seconds" in words else []


def words_of(text: str, mark: str) -> list[str]:
    """Return what must agree: words, and numbers unless they vary."""
    if "numbers vary" in mark:  # on a busy machine noise may hide how much faster a model is
        text = re.sub(r"(narrowed [\d.]+ ms): .*", r"\1", text)
    words = text.split()
    if "numbers vary" in mark:
        words = [re.sub(r"[\d.,]+(e[+-]?\d+)?", "N", word) for word in words if set(word) != {"─"}]
    return words
