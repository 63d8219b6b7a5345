"""Run the user's own code, given as `file.py:function`.  No other user input is ever executed."""

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
    """Return True if a text has the form `file.py:function`."""
    return bool(re.fullmatch(r".+\.py:\w+", text))


@contextlib.contextmanager
def called(text: str, error: type[OnnxGrailError] = DataError) -> Iterator[Any]:
    """Run a Python file and yield the named object: the result of the function, or the value itself.

    Raises:
        OnnxGrailError: of the given type: no such file or name, or the code raises, also inside the context.
    """
    with loaded(text, error) as found:
        is_made = callable(found) and (inspect.isclass(found) or not hasattr(found, "forward"))  # modules are values
        yield found() if is_made else found


@contextlib.contextmanager
def loaded(text: str, error: type[OnnxGrailError] = DataError) -> Iterator[Any]:
    """Run a Python file and yield the named object as it is.

    The file may import its neighbors, also later while the context is open.  Its prints go to stderr, because stdout
    carries the result of a command.

    Raises:
        OnnxGrailError: of the given type: no such file or name, or the code raises, also inside the context.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"no file {str(path)!r}", hint="Give file.py:function")
    with explained(f"{path.name}:{name}", error), beside(path.parent):
        spec = importlib.util.spec_from_file_location(f"_onnxgrail_script_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise error(f"{str(path)!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses of the file look up their annotations there
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise error(f"{str(path)!r} defines no {name!r}", hint="Give file.py:function")
        yield getattr(module, name)


@contextlib.contextmanager
def explained(source: str, kind: type[OnnxGrailError] = DataError) -> Iterator[None]:
    """Turn any exception of the user's code into a one-line error."""
    try:
        yield
    except OnnxGrailError:
        raise
    except (Exception, SystemExit) as error:  # the exit code of a user's SystemExit would be mistaken for ours
        raise kind(f"{source} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Let the user's code import its neighbors, as it can when run as a script, and print to stderr.

    No byte code is written next to the user's files.
    """
    entry, quiet = str(folder.resolve()), sys.dont_write_bytecode
    sys.path.insert(0, entry)
    sys.dont_write_bytecode = True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.dont_write_bytecode = quiet
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
