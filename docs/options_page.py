"""Write `docs/options.md` from the table of options and `docs/templates/options.md`: `python docs/options_page.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

from onnxgrail.cli import main
from onnxgrail.recipe.table import GROUPS, OPTIONS
from onnxgrail.recipe.table.option import Option

DOCS = Path(__file__).resolve().parent
escaped = runpy.run_path(str(DOCS / "cli_page.py"))["escaped"]
MORE = {
    "ratio": "Shared weights count once; the report shows the requested and the achieved ratio.",
    "round_to": "Most kernels need such widths for speed; blocks that are too narrow use a divisor "
    "([widths](how-it-works.md#widths)).",
    "selector": "`wandapp` needs torch. [Choosing a method](choosing.md) compares them on measured data.",
    "reducer": "[All reducers](how-it-works.md#choosing).",
    "method": "[GRASP](grasp.md), [input compensation](ic.md).",
    "data": "[All formats](data.md).",
    "held_out": "[Which samples judge](data.md#which-samples-judge).",
    "compensate": "`best` refits every matrix and convolution downstream of a pruned block to the outputs of the "
    "original network, and keeps what helps held-out samples ([choosing](choosing.md)).",
    "norms": "`all` does both; only what helps held-out samples is kept ([REPAIR](https://arxiv.org/abs/2211.08403)).",
    "refine": "Takes minutes instead of seconds ([refine](refine.md)).",
    "save_as_external_data": "The separate file is `OUT.CHECKSUM.data`.",
    "keep_initializer_inputs": "[Weights that are inputs](#weights-that-are-inputs).",
    "simplify": "[Deploy](deploy.md#simplify).",
    "quantize": "[Deploy](deploy.md#quantize).",
    "save_recipe": "[Repeat a run](deploy.md#repeat-a-run).",
    "target": "[Deploy](deploy.md#tensorrt).",
    "report": "[The page](report.md).",
    "device": "[On a GPU](gpu.md).",
    "custom_ops": "Only the command may name it, never a recipe ([security](../SECURITY.md)); channels stop at such an "
    "operator unless it has [a rule](adding-an-op.md).",
    "resume": "It writes the same bytes ([long runs](distributed.md)).",
}
"""Sentences with links that follow the help text."""


def page() -> str:
    """Return the whole page: the words of the template, and a table per heading."""
    text = "\n".join(map(section, GROUPS))
    return (DOCS / "templates" / "options.md").read_text(encoding="utf-8").replace("{{reference}}\n", text)


def section(group: str) -> str:
    """Return the table of a heading."""
    rows = [line(row) for row in OPTIONS.values() if row.group == group]
    head = "| option | default | commands | meaning |\n|---|---|---|---|\n"
    return f"## {group}\n\n{head}{''.join(rows)}"


def line(row: Option) -> str:
    """Return the row of an option."""
    words = (*row.spellings, row.off) if row.commands else (row.name,)
    names = ", ".join(f"`{word}`" for word in words if word)
    metavar = (row.metavar or row.value.metavar).replace("|", "\\|")
    one = row.value.kind == "word"
    value = ", ".join(f"`{word}`" for word in row.value.words) if one else f"`{metavar}`" if metavar else ""
    meaning = " ".join(filter(None, (escaped(row.help), MORE.get(row.name))))
    commands = ", ".join(name for name in main.commands if name in row.commands)
    cells = (f"{names} {value}".strip(), default(row), commands or "Python, recipe files", meaning)
    return f"| {' | '.join(cells)} |\n"


def default(row: Option) -> str:
    """Return the default of an option, or an empty string if it says nothing."""
    if row.otherwise:
        return escaped(row.otherwise)
    if row.value.kind == "flag":
        return f"`{row.spelled if row.default else row.off}`" if row.off else "off"
    if row.value.kind == "words":
        return f"`{','.join(row.default) or row.value.empty}`"
    return f"`{row.default}`" if isinstance(row.default, str | int | float) else ""


if __name__ == "__main__":
    DOCS.joinpath("options.md").write_text(page(), encoding="utf-8")
