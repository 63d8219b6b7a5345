"""Libraries with custom operators, given on the command line or in the call, for every session opened in a context."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxgrail.calibration.runtime.session import LIBRARIES, LIBRARY, register, runtime
from onnxgrail.errors import UsageError

Libraries = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def files_of(libraries: Libraries) -> list[str]:
    """Return the absolute paths of libraries.

    Raises:
        UsageError: one is not a file.
    """
    given = [libraries] if isinstance(libraries, str | os.PathLike) else list(libraries)
    paths = [Path(library).absolute() for library in given]
    for path in paths:
        if not path.is_file():
            why = "it is not a library, but a folder" if path.is_dir() else "there is no such file"
            raise UsageError(f"--custom-ops {path}: {why}", hint=LIBRARY)
    return [str(path) for path in paths]


@contextmanager
def custom_ops(libraries: Libraries) -> Iterator[None]:
    """Register libraries of custom operators with every session opened in the context.

    Args:
        libraries: a path, or several.  Their code is run.

    Raises:
        UsageError: there is no such file, or ONNX Runtime cannot load it.
    """
    paths = files_of(libraries)
    token = LIBRARIES.set(tuple(dict.fromkeys((*LIBRARIES.get(), *paths))))
    try:
        if paths:
            register(runtime().SessionOptions())  # reports libraries that cannot be loaded before the work starts
        yield
    finally:
        LIBRARIES.reset(token)
