"""Real English text without a download: the documentation that ships with Python, as token arrays.

    python bench/minilm_text.py OUT [--cache DIR]     writes OUT/calib.npz and OUT/heldout.npz

Modules are dealt to one of the two sets by a hash of their name, so held-out text comes from other modules than
calibration text.  The text is that of the running Python, so arrays made by different Python releases differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minilm_export
import numpy as np
import numpy.typing as npt

LENGTH = 128
SEQUENCES = 128
FULL_SHARE = 0.5
"""Share of sequences that are filled to the last token; the others end where a paragraph ends and are padded."""
SPLITS = ("calib", "heldout")
MIN_WORDS = 8

Tokens = dict[str, npt.NDArray[np.int64]]


def split_of(source: str) -> str:
    """`calib` or `heldout`, the same on every machine (Python's own hash of a string is salted)."""
    return SPLITS[zlib.crc32(source.encode()) % len(SPLITS)]


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    plain = [word for word in words if re.fullmatch(r"[A-Za-z][a-z']*[.,;:)]?", word)]
    return len(words) >= MIN_WORDS and len(plain) >= 0.75 * len(words) and ">>>" not in paragraph


def paragraphs(split: str) -> list[str]:
    """Distinct prose paragraphs of one split, in a fixed random order."""
    from onnxgrail.models._stdlib_text import TOPICS, documents

    seen: dict[str, None] = {}
    other: set[str] = set()  # sentences such as "Return the name." occur in many modules and must not be in both sets
    for document, text in documents():
        source = document if document.startswith(TOPICS) else document.split("/")[0]  # a package is one module
        for raw in re.split(r"\n\s*\n", text):
            paragraph = " ".join(raw.split())
            if not _is_prose(paragraph):
                continue
            if split_of(source) == split:
                seen[paragraph] = None
            else:
                other.add(paragraph)
    ours = [paragraph for paragraph in seen if paragraph not in other]
    order = np.random.default_rng(0).permutation(len(ours))
    return [ours[i] for i in order]


def tokenise(folder: Path, texts: list[str], *, count: int = SEQUENCES, length: int = LENGTH) -> Tokens:
    """`count` sequences of whole paragraphs: the first half cut at `length`, the others ended early and padded."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    start, end, pad = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
    stream = iter(texts)
    ids = np.full((count, length), pad, np.int64)
    for row in range(count):
        body = _fill(tokenizer, stream, length - 2, full=row < FULL_SHARE * count)
        ids[row, : len(body) + 2] = [start, *body, end]
    order = np.random.default_rng(1).permutation(count)  # full and padded sequences in every batch
    ids = ids[order]
    return {"input_ids": ids, "attention_mask": (ids != pad).astype(np.int64)}


def _fill(tokenizer: Any, texts: Iterator[str], room: int, *, full: bool) -> list[int]:
    """Tokens of paragraphs joined until `room` is used up, or of one to two paragraphs where `full` is not asked."""
    body: list[int] = []
    while len(body) < (room if full else room // 4):
        text = next(texts, None)
        if text is None:
            raise RuntimeError("the documentation of this Python is too short for the sequences asked for")
        body += tokenizer.encode(text, add_special_tokens=False).ids
    return body[:room]


def ensure(out: Path, cache: Path) -> dict[str, Path]:
    """Paths of both token files by split; written on the first call."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {split: out / f"{split}.npz" for split in SPLITS}
    for split, path in paths.items():
        if not path.exists():
            tokens = tokenise(minilm_export.model_folder(cache), paragraphs(split))
            mask = tokens["attention_mask"]
            np.savez_compressed(path, input_ids=tokens["input_ids"], attention_mask=mask)
            mean = mask.sum(axis=1).mean()
            print(f"{path}: {len(tokens['input_ids'])} sequences, {mean:.0f} real tokens on average", file=sys.stderr)
    return paths


def main() -> None:
    """Write both token files and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the two .npz files")
    parser.add_argument("--cache", type=Path, default=minilm_export.DEFAULT_CACHE, help="folder for the package")
    args = parser.parse_args()
    for path in ensure(args.out, args.cache).values():
        print(path)


if __name__ == "__main__":
    main()
