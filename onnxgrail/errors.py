"""Exceptions.  Misuse raises; what cannot be narrowed is a `Refusal`; numeric trouble is an `Outcome`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def raised(error: Exception) -> str:
    """Return what foreign code raised, in words with its line: `raised KeyError: 'x' (rules.py:12)`."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {in_words(error)} ({Path(frame.filename).name}:{frame.lineno})"


def in_words(error: Exception) -> str:
    """Return an error with its type on one line: `KeyError: 'x'`."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question with the known name that is most similar; empty if none is.

    Args:
        name: an unknown one.
        known: names.
        cutoff: least similarity, from 0 to 1.
    """
    import difflib  # only where something is wrong

    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"Did you mean {close[0]!r}?" if close else ""


def first_cause(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class OnnxGrailError(Exception):
    """Base of all errors that a user can meet.  `hint` says what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        """Return one line: the problem, then the hint."""
        message = " ".join(super().__str__().split())
        return f"{message.rstrip('.')}. {self.hint}" if self.hint else message


class UsageError(OnnxGrailError, ValueError):
    """An option is out of range or contradicts another one (exit code 2)."""


class DeviceError(UsageError):
    """The requested device is not available; no other device is used instead (exit code 2)."""


class ModelError(OnnxGrailError):
    """The model cannot be read, does not run, or uses something the tool cannot represent."""


class StoppedError(ModelError):
    """Running the model took longer than the environment allows."""


class UnsupportedOpError(ModelError):
    """Gradients cannot pass a node: torch has no function for `op`, or not for this variant."""

    def __init__(self, message: str, *, hint: str = "", op: str = "") -> None:
        super().__init__(message, hint=hint)
        self.op = op


class DataError(OnnxGrailError):
    """Calibration or comparison data do not fit the model's inputs, or hold NaN or infinity."""


class MetricError(OnnxGrailError):
    """The user's metric function cannot be called, raises, or does not return usable losses."""


class OutputError(OnnxGrailError):
    """The output cannot be written: it exists, is the same file as the input, or its folder is not writable."""


class RewriteError(OnnxGrailError):
    """A postcondition of the rewriter failed: a bug of onnxgrail, not of the user."""


class MissingExtraError(OnnxGrailError, ImportError):
    """An optional dependency is not installed; the hint names the pip extra."""


class LostProcessError(OnnxGrailError):
    """Another process of the same job failed or cannot be reached."""


class NothingToCompressError(OnnxGrailError):
    """No block of the model can be narrowed as requested, or the file would grow (exit code 4); see `report`."""

    def __init__(self, message: str, *, hint: str = "", report: object | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report
