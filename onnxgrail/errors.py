"""The exception tree.  Misuse raises; what cannot be narrowed is a `Refusal`; numeric trouble is an `Outcome`."""

from __future__ import annotations


class OnnxGrailError(Exception):
    """Base of every error a user can meet.  `hint` says what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        """One line: what is wrong, then the fix."""
        message = " ".join(super().__str__().split())
        return f"{message.rstrip('.')}. {self.hint}" if self.hint else message


class UsageError(OnnxGrailError, ValueError):
    """An option is out of range or contradicts another one (exit code 2)."""


class DeviceError(UsageError):
    """A device was asked for that cannot be had; nothing falls back to another one (exit code 2)."""


class ModelError(OnnxGrailError):
    """The model cannot be read, does not run, or uses something the tool cannot represent."""


class StoppedError(ModelError):
    """A run of the model took longer than the environment allows."""


class QuantisedError(ModelError):
    """Quantisation was asked for, and the model is quantised already: narrowing comes first, on float weights."""


class UnsupportedOpError(ModelError):
    """Gradients cannot pass a node: `op` has no function in torch, or not in this variant."""

    def __init__(self, message: str, *, hint: str = "", op: str = "") -> None:
        super().__init__(message, hint=hint)
        self.op = op


class DataError(OnnxGrailError):
    """Calibration or comparison data do not fit the model's inputs, or hold NaN or infinity."""


class OutputError(OnnxGrailError):
    """The output cannot be written: it exists, equals the input, or its folder is not writable."""


class RewriteError(OnnxGrailError):
    """A postcondition of the rewriter failed: a bug of onnxgrail, not of the user."""


class MissingExtraError(OnnxGrailError, ImportError):
    """An optional dependency is not installed; the hint names the pip extra."""


class LostProcessError(OnnxGrailError):
    """Another process of the same job failed or cannot be reached."""


class NothingToCompressError(OnnxGrailError):
    """No block of the model can be narrowed as asked, or the file would grow (exit code 4); `report` says why."""

    def __init__(self, message: str, *, hint: str = "", report: object | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report
