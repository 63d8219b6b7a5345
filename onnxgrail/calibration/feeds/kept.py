"""The ids of `--keep-tokens`, and a model whose tables have no rows for others."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir

from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.core import Refusal
from onnxgrail.errors import UsageError
from onnxgrail.graph.io.mapped import keep
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.rows import Trimmed, trim
from onnxgrail.machine.amounts import whole

OTHERS = ("mask", "position", "segment", "token_type")  # parts of names of integer inputs that hold no tokens


def trimmed(
    model: ir.Model, path: str | None, *, tied: bool
) -> tuple[ir.Model, tuple[Trimmed, ...], tuple[Refusal, ...]]:
    """Return a copy of a model without the rows of tables that only other ids than those of a file look up.

    Args:
        model: the model as it was read.
        path: of the file; None if all rows stay.
        tied: also cut tables that are the head of the model.

    Returns:
        The copy (the model itself if all rows stay), the tables that lost rows, and why others did not.

    Raises:
        UsageError: the file cannot be read, or no table loses rows.
    """
    if path is None:
        return model, (), ()
    ids, small = ids_of(Path(path)), copy(model)
    integers = [entry.name for entry in signature_of(model) if entry.dtype.kind in "iu"]
    tokens = [name for name in integers if not any(word in name.lower() for word in OTHERS)]
    tables, refusals = trim(small, ids, tokens, tied=tied)
    if not tables:
        why = [f"{one.value}: {one.reason}" for one in refusals] or ["the model looks up no input in a table"]
        raise UsageError(f"--keep-tokens removes no row of a table: {'; '.join(why)}", hint="Leave it out")
    return keep(small), tuple(tables), tuple(refusals)


def ids_of(path: Path) -> list[int]:
    """Read ids: a JSON list, or text with one per line.

    Raises:
        UsageError: the file cannot be read, is empty, or holds anything else.
    """
    hint = "Give a JSON list of ids, or a text file with one id per line"
    if not path.is_file():
        raise UsageError(f"--keep-tokens {str(path)!r} is not a file", hint=hint)
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text) if text.lstrip().startswith(("[", "{")) else text.split()
    except (OSError, ValueError, RecursionError) as error:  # also bytes that are not text
        raise UsageError(f"--keep-tokens {path} cannot be read: {error}", hint=hint) from error
    ids = []
    for word in found if isinstance(found, list) else ():
        number = whole(str(word))
        if number is None:
            raise UsageError(f"--keep-tokens {path} holds {str(word)[:80]!r}, which is not an id", hint=hint)
        ids.append(number)
    if not ids:
        raise UsageError(f"--keep-tokens {path} holds no ids", hint=hint)
    return ids
