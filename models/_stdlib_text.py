"""The training text of the character model: the documentation of Python's standard library.

Docstrings are taken from the source files without importing them; the topics are those of `help("topics")`, which
are the language reference.  Text and split depend only on the Python version.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

# A line break and the printable ASCII characters; all others become a question mark.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
SHORTEST = 40
HELD_OUT_SHARE = 1 / 16
TOPICS = "topics/"

# Packages that are tests, belong to other projects, or are not installed with every Python.
_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}
)


def encode(text: str) -> npt.NDArray[np.int64]:
    """Map text to positions in `ALPHABET`."""
    lookup = np.full(128, ALPHABET.index("?"), dtype=np.int64)
    lookup[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    codes = np.frombuffer(text.expandtabs(4).encode("ascii", errors="replace"), dtype=np.uint8)
    return lookup[codes]


def decode(ids: npt.NDArray[np.int64]) -> str:
    """Map positions `(n,)` in `ALPHABET` back to text."""
    return "".join(ALPHABET[position] for position in ids.tolist())


def corpus() -> tuple[str, str]:
    """Return the training text and the held-out text, which comes from other modules and shares no docstring."""
    training: dict[str, None] = {}
    unseen: dict[str, None] = {}
    for name, text in documents():
        (unseen if is_held_out(name) else training).setdefault(text)
    return "\n\n".join(training), "\n\n".join(text for text in unseen if text not in training)


def is_held_out(name: str) -> bool:
    """Return True if a module is held out, by its name alone, so that new modules of Python do not move others.

    Topics quote each other, so all of them are for training.
    """
    return not name.startswith(TOPICS) and hashlib.sha256(name.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def documents() -> Iterator[tuple[str, str]]:
    """Yield (module, text) for every docstring and topic that is long enough to be prose, in a fixed order."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted((*root.glob("*.py"), *root.glob("*/*.py"))):
        relative = path.relative_to(root)
        if not _SKIPPED.intersection(relative.parts):
            for text in docstrings(path.read_text(encoding="utf-8")):
                yield relative.as_posix(), text
    for name, text in sorted(topics.items()):
        yield TOPICS + name, text.strip()


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions, outermost first."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            if len(text) >= SHORTEST:
                yield text
