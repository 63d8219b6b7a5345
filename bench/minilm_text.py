"""Real English text without a download: the language reference that ships with Python, as token arrays.

    python bench/minilm_text.py OUT [--cache DIR] [--draw N] [--padded SHARE]

writes OUT/calib.npz and OUT/heldout.npz, 128 sequences of 128 tokens each.

The text is that of `help("topics")`: edited English sentences, the same on every machine with this Python release.
Docstrings are left out, because most are fragments ("Return the name of x."), which the encoder was not trained for.

Calibration and held-out text are independent samples of one corpus: its prose paragraphs are shuffled and assigned
alternately to the two sets.  Topics quote each other, so a paragraph is dropped if it shares a sentence, or a run of
eight words, with an earlier one: no held-out paragraph was seen in calibration.  The sets do share their subjects; the
result is worse on text of another kind than the calibration text.

Every sequence is full by default: paragraphs are joined until it is, and the last one is cut.  `--padded` ends a
share of the sequences early, to test padding.  `--draw` sets the seed of the shuffle, to measure the random variation.
`wide` makes more text: docstrings of the standard library, numpy and scipy in addition to the reference.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import minilm_export
import numpy as np
import numpy.typing as npt

LENGTH = 128
SEQUENCES = 128
SPLITS = ("calib", "heldout")
MIN_WORDS = 8
RUN = 8
"""Length of a run of words that no two paragraphs may share."""

Tokens = dict[str, npt.NDArray[np.int64]]


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    plain = [word for word in words if re.fullmatch(r"[A-Za-z][a-z']*[.,;:)]?", word)]
    return len(words) >= MIN_WORDS and len(plain) >= 0.75 * len(words) and ">>>" not in paragraph


def _traces(paragraph: str) -> set[str]:
    """Return whole sentences and runs of words, normalized, which no two paragraphs may share."""
    sentences = re.split(r"(?<=[.!?:;])\s", paragraph.lower())
    plain = [" ".join(re.findall(r"\w+", sentence)) for sentence in sentences]
    words = " ".join(plain).split()
    runs = (" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1))
    return {*filter(None, plain), *runs}


def paragraphs(draw: int = 0) -> dict[str, list[str]]:
    """Return distinct prose paragraphs by split, in an order that depends only on `draw`."""
    kept = _distinct(_reference(), draw)
    return {split: kept[number :: len(SPLITS)] for number, split in enumerate(SPLITS)}


def _reference() -> Iterator[str]:
    """Yield the texts of the language reference."""
    from pydoc_data.topics import topics

    return (text for _, text in sorted(topics.items()))


def _docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library, numpy and scipy."""
    folders = [Path(sysconfig.get_path("stdlib"))]
    folders += [Path(spec.origin).parent for n in ("numpy", "scipy") if (spec := importlib.util.find_spec(n)).origin]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "test" in str(path.relative_to(folder)) or "site-packages" in path.parts[len(folder.parts) :]:
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue
            nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
            yield from filter(None, map(ast.get_docstring, nodes))


def _distinct(texts: Iterable[str], draw: int) -> list[str]:
    """Return shuffled prose paragraphs, no two of which share a sentence or a run of words."""
    raw = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    prose = list(dict.fromkeys(filter(_is_prose, raw)))
    seen: set[str] = set()
    kept = []
    for position in np.random.default_rng(draw).permutation(len(prose)):
        traces = _traces(prose[position])
        if not traces & seen:
            kept.append(prose[position])
        seen |= traces
    return kept


def wide(folder: Path, calibration: int, heldout: int) -> tuple[Tokens, Tokens]:
    """Return calibration and held-out sequences from docstrings and reference: every third paragraph is held out."""
    kept = _distinct(itertools.chain(_reference(), _docstrings()), draw=0)
    rest = [text for number, text in enumerate(kept) if number % 3 < 2]
    return tokenise(folder, rest, count=calibration), tokenise(folder, kept[2::3], count=heldout)


def tokenise(
    folder: Path, texts: list[str], *, count: int = SEQUENCES, length: int = LENGTH, padded: float = 0.0
) -> Tokens:
    """Return `count` sequences of joined paragraphs, cut at `length`; a share `padded` of them ends early."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    start, end, pad = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
    stream = iter(texts)
    ids = np.full((count, length), pad, np.int64)
    for row in range(count):
        body = _fill(tokenizer, stream, length - 2, full=row < (1 - padded) * count)
        ids[row, : len(body) + 2] = [start, *body, end]
    order = np.random.default_rng(1).permutation(count)  # full and padded sequences in every batch
    ids = ids[order]
    return {"input_ids": ids, "attention_mask": (ids != pad).astype(np.int64)}


def _fill(tokenizer: Any, texts: Iterator[str], room: int, *, full: bool) -> list[int]:
    """Return tokens of paragraphs joined up to `room`, or of one to two paragraphs if not `full`."""
    body: list[int] = []
    while len(body) < (room if full else room // 4):
        text = next(texts, None)
        if text is None:
            raise RuntimeError("the language reference of this Python is too short for the sequences asked for")
        body += tokenizer.encode(text, add_special_tokens=False).ids
    return body[:room]


def _paths(out: Path) -> dict[str, Path]:
    return {split: out / f"{split}.npz" for split in SPLITS}


def write(out: Path, cache: Path = minilm_export.DEFAULT_CACHE, *, draw: int = 0, padded: float = 0.0) -> None:
    """Write both token files, replacing older ones."""
    out.mkdir(parents=True, exist_ok=True)
    folder = minilm_export.model_folder(cache)
    texts = paragraphs(draw)
    for split, path in _paths(out).items():
        tokens = tokenise(folder, texts[split], padded=padded)
        mask = tokens["attention_mask"]
        np.savez_compressed(path, input_ids=tokens["input_ids"], attention_mask=mask)
        mean = mask.sum(axis=1).mean()
        print(f"{path}: {len(mask)} sequences, {mean:.0f} real tokens on average", file=sys.stderr)


def ensure(out: Path, cache: Path = minilm_export.DEFAULT_CACHE) -> dict[str, Path]:
    """Return the paths of both token files by split; written on the first call."""
    paths = _paths(out)
    if not all(path.exists() for path in paths.values()):
        write(out, cache)  # both, so that they have the same seed
    return paths


def main() -> None:
    """Write both token files and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the two .npz files")
    parser.add_argument("--cache", type=Path, default=minilm_export.DEFAULT_CACHE, help="folder for the package")
    parser.add_argument("--draw", type=int, default=0, help="number of the random draw")
    parser.add_argument("--padded", type=float, default=0.0, help="share of sequences that end early, 0 to 1")
    args = parser.parse_args()
    write(args.out, args.cache, draw=args.draw, padded=args.padded)
    for path in _paths(args.out).values():
        print(path)


if __name__ == "__main__":
    main()
