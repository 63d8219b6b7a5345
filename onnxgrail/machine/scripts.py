"""The user's own code: what a `file.py:function` names.  Nothing else that is given to the program is ever run."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxgrail.errors import DataError, OnnxGrailError


def is_named(text: str) -> bool:
    """Whether a text has the form `file.py:function`."""
    return bool(re.fullmatch(r".+\.py:\w+", text))


@contextlib.contextmanager
def called(text: str, error: type[OnnxGrailError] = DataError) -> Iterator[Any]:
    """Run a file and give what it calls by this name: call a function, or take a value as it is.

    The file may import its neighbours, also from what is done with the value inside the context.  What it prints goes
    to stderr: stdout carries the result of a command.

    Args:
        text: `file.py:function`.
        error: what to raise.

    Raises:
        OnnxGrailError: of the given type: no such file or name, or the code raises, also inside the context.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"no file {str(path)!r}", hint="Give file.py:function")
    with (
        _explained(f"{path.name}:{name}", error),
        _importable(path.parent),
        contextlib.redirect_stdout(sys.stderr),
    ):
        spec = importlib.util.spec_from_file_location(f"_onnxgrail_script_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise error(f"{str(path)!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses of the file look for their annotations
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise error(f"{str(path)!r} defines no {name!r}", hint="Give file.py:function")
        found = getattr(module, name)
        is_made = callable(found) and (inspect.isclass(found) or not hasattr(found, "forward"))  # modules are values
        yield found() if is_made else found


@contextlib.contextmanager
def _explained(source: str, kind: type[OnnxGrailError]) -> Iterator[None]:
    """Turn whatever the user's code raises into one line."""
    try:
        yield
    except OnnxGrailError:
        raise
    except (Exception, SystemExit) as error:  # a code of the user's own would be taken for one of ours
        raise kind(f"{source} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The user's file may import its neighbours, as it would when run as a script."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
