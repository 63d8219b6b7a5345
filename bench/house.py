"""Measure the layout of the code: folders, functions, parameters, imports, layers.

    python bench/house.py > bench/results/house.json

Prints JSON: every limit, the largest value, and the names beyond the limit.  `tests/test_house.py` checks them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "onnxgrail"
LOOSE, FILES, MODULE, FUNCTION, PARAMETERS, IMPORTS, LAYERS, LINES = 6, 14, 350, 60, 6, 20, 16, 35_000
PUBLIC = ("commands/*.py", "exporting/call.py")  # calls with a keyword per option
ASKS = re.compile(r'"""(What|Whether|Where|Who|How) ')

Function = ast.FunctionDef | ast.AsyncFunctionDef


def measure(root: Path = HOUSE) -> dict[str, dict[str, Any]]:
    """Return by limit: its value, the largest value, and the names with values beyond it."""
    texts = {_name(path, root): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    functions = {f"{name}:{f.name}": f for name, tree in trees.items() for f in _functions(tree)}
    inside = {name: _parameters(f) for name, f in functions.items() if not _public(name, f)}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    folders = {path.parent for path in root.rglob("*.py")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        "loose modules": _limit(LOOSE, {"onnxgrail": sum("/" not in name for name in texts)}),
        "files in a folder": _limit(FILES, {_name(d, root): len(list(d.glob("[!_]*.py"))) for d in folders}),
        "lines of a module": _limit(MODULE, lines),
        "lines of a function": _limit(FUNCTION, {name: _length(f) for name, f in functions.items()}),
        "parameters of a function": _limit(PARAMETERS, inside),
        "imports of our modules": _limit(IMPORTS, {name: _imports(tree) for name, tree in trees.items()}),
        "layers": _limit(LAYERS, {"onnxgrail": len(project["tool"]["importlinter"]["contracts"][0]["layers"])}),
        "docstrings that ask": _limit(0, {name: len(ASKS.findall(text)) for name, text in texts.items()}),
        "lines": _limit(LINES, {"onnxgrail": sum(lines.values())}),
    }


def _limit(limit: int, values: Mapping[str, int]) -> dict[str, Any]:
    beyond = {name: value for name, value in values.items() if value > limit}
    ordered = dict(sorted(beyond.items(), key=lambda item: (-item[1], item[0])))
    return {"limit": limit, "largest": max(values.values()), "beyond": ordered}


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _length(function: Function) -> int:
    """Return the number of lines of a body, without signature and docstring, which list arguments."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def _parameters(function: Function) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in given)


def _public(name: str, function: Function) -> bool:
    return not function.name.startswith("_") and any(Path(name.partition(":")[0]).match(pattern) for pattern in PUBLIC)


def _imports(tree: ast.AST) -> int:
    modules = (node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return len({module for module in modules if module.startswith("onnxgrail")})


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    print()
