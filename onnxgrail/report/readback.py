"""Handle reports that were read from a file, and so may hold anything."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from onnxgrail.errors import ModelError, OnnxGrailError
from onnxgrail.machine.files.paths import Read

P = ParamSpec("P")
R = TypeVar("R")
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def whole(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method of a report so that damage of a report read from a file gives a one-line error.

    Raises:
        ModelError: the report is damaged.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with undamaged(read_back=getattr(args[0], "read_back", False)):
            return method(*args, **kwargs)

    return call


@contextlib.contextmanager
def undamaged(*, read_back: bool) -> Iterator[None]:
    """Turn errors that damage of a report read from a file causes into a one-line error.

    Raises:
        ModelError: the report is damaged.
    """
    try:
        yield
    except OnnxGrailError:
        raise
    except DAMAGE as error:
        if not read_back:
            raise
        text = f"the report is damaged: {type(error).__name__}: {error}"
        raise ModelError(text, hint="Make it again with --report") from error


def reads(data: Mapping[str, Any]) -> list[Read]:
    """Return the files that a run has read, as far as its report names them."""
    held_out = (data.get("verification") or {}).get("held_out") or {}
    places = (
        ("the input", (data.get("model") or {}).get("input")),
        ("the calibration data", (data.get("calibration") or {}).get("source")),
        ("the held-out data", held_out.get("source")),
        ("the reference", (data.get("reference") or {}).get("path")),
    )
    files = [(what, Path(path)) for what, path in places if isinstance(path, str)]
    return [Read(path=path, what=what) for what, path in files if os.path.isfile(path)]  # noqa: PTH113  no error for odd names
