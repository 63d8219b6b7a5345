"""Optional packages: those of an extra of onnxgrail, and the versions of what is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib import metadata
from typing import Any

from onnxgrail.errors import MissingExtraError


def extra(package: str, name: str, what: str) -> Any:
    """Import and return an optional package.

    Args:
        package: the module to import.
        name: of the extra of onnxgrail that installs it.
        what: begins the message, such as "images need pillow".

    Raises:
        MissingExtraError: it cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(name, what) from error


def require(package: str, name: str, what: str) -> None:
    """Check that an optional package is installed, without importing it; see `extra`.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise _missing(name, what)


def _missing(name: str, what: str) -> MissingExtraError:
    return MissingExtraError(f"{what}, which is not installed", hint=install(name))


def install(name: str) -> str:
    """Return the hint that tells how to install an extra."""
    return f"Run: pip install 'onnxgrail[{name}]'"


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
