"""Prints the oldest releases that pyproject.toml allows, as constraints of pip, for `make oldest`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("cpu", "simplify", "test")
BOUND = re.compile(r"(?P<name>[\w-]+)(\[[\w,]+\])?>=(?P<version>[\d.]+)")


def oldest(project: Path) -> list[str]:
    """Return one constraint per dependency, `name==version`.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    wanted = [*table["dependencies"], *(line for extra in EXTRAS for line in table["optional-dependencies"][extra])]
    found = []
    for line in dict.fromkeys(wanted):
        bound = BOUND.match(line)
        if bound is None:
            raise ValueError(f"pyproject.toml: {line} has no lower bound")
        found.append(f"{bound['name']}=={bound['version']}")
    return found


if __name__ == "__main__":
    for constraint in oldest(Path(__file__).resolve().parents[1] / "pyproject.toml"):
        sys.stdout.write(f"{constraint}\n")
