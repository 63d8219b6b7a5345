"""Import rules that import-linter cannot see, because `cli/` stands beside the package, and the cost of `--help`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from tests.e2e import nets

ROOT = Path(__file__).resolve().parents[1]
PRINTING = {"click", "rich"}
TABLE = ("onnxgrail", "recipe", "table")  # what the command line reads of the library besides public names
HEAVY = {"onnx_ir", "onnxruntime", "torch", "transformers"}
HELP_LIMIT = 1.5  # seconds; what matters is HEAVY, this only catches a start that became slow by other means

UNASKED = {
    "methods.grasp.method",
    "methods.refine.refinement",
    "methods.refine.steps",
    "narrowing.gradients",
    "report.page",
    "torchgraph",
}
EXTRAS = {"PIL", "matplotlib", "onnx_graphsurgeon", "onnxslim", "pyarrow", "rich", "tokenizers", "torch", "yaml"}

HELP = """
import json, sys
from onnxgrail.cli import main
try:
    main(["--help"])
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""

RUN = """
import atexit, json, sys
from onnxgrail.__main__ import main

def told():
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)

atexit.register(told)
main()
"""


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) of every import in a file, at whatever depth; a relative module starts with dots."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder}/ holds no Python files"
    return found


def test_cli_uses_only_public_names() -> None:
    import onnxgrail

    wrong = []
    for path in sources("cli"):
        for module, names in imports(path):
            top = module.split(".")[0]
            if module.startswith(".."):
                wrong.append(f"{path.name}: relative import {module} leaves the folder")
            elif module == "onnxgrail":
                private = sorted(set(names) - set(onnxgrail.__all__))
                wrong += [f"{path.name}: onnxgrail.{name} is not in onnxgrail.__all__" for name in private]
            elif tuple(module.split(".")[:3]) == TABLE:
                continue
            elif top not in {"", "__future__", *PRINTING, *sys.stdlib_module_names}:
                wrong.append(f"{path.name}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_cli() -> None:
    wrong = []
    for path in [*sources("onnxgrail"), *sources("models")]:
        if path == ROOT / "onnxgrail" / "__main__.py":  # the program is the command line
            continue
        for module, names in imports(path):
            if module.split(".")[:2] == ["onnxgrail", "cli"] or (module == "onnxgrail" and "cli" in names):
                wrong.append(f"{path.relative_to(ROOT)}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_public_names_exist_and_are_few() -> None:
    import onnxgrail

    assert len(onnxgrail.__all__) == len(set(onnxgrail.__all__)) <= 30
    missing = [name for name in onnxgrail.__all__ if not hasattr(onnxgrail, name)]
    assert not missing


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0
    assert "Usage" in done.stdout
    assert sorted(HEAVY & set(modules)) == []


def test_help_starts_quickly() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "onnxgrail", "--help"], capture_output=True, check=True, timeout=60)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < HELP_LIMIT


def test_the_library_starts_without_scipy() -> None:
    """Half a second of each start; steps that need a part of it import that part."""
    code = "import onnxgrail.commands.compress, sys; print([n for n in sys.modules if n.split('.')[0] == 'scipy'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_plain_run_imports_only_what_it_needs(tmp_path: Path) -> None:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    words = ["compress", "m.onnx", "--ratio=0.3", "--report", "m.json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stderr.splitlines()[-1])
    assert sorted({*EXTRAS, *(f"onnxgrail.{name}" for name in UNASKED)} & set(modules)) == []
    assert "onnxgrail.narrowing.decide" in modules


@pytest.mark.parametrize("launch", [["-m", "onnxgrail"], ["-c", "from onnxgrail.cli import main; main()"]])
def test_both_ways_to_start_are_one_program(launch: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *launch, "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "0." in done.stdout
