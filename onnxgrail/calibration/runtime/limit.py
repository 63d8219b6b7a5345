"""A time limit for runs of a model, because an untrusted file may hold an infinite loop."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from onnxgrail.errors import StoppedError, UsageError

SECONDS = "ONNXGRAIL_RUN_SECONDS"


def seconds() -> float | None:
    """Return the limit set in the environment; None for no limit.

    Raises:
        UsageError: the value is not a positive number.
    """
    text = os.environ.get(SECONDS, "").strip()
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < threading.TIMEOUT_MAX:
        raise UsageError(f"the environment has {SECONDS}={text}, a number of seconds is needed")
    return found


@contextlib.contextmanager
def limited() -> Iterator[Any]:
    """Yield run options that stop a run after the time limit; None if there is no limit.

    Raises:
        StoppedError: the run was stopped.
    """
    limit = seconds()
    if limit is None:
        yield None
        return
    options = importlib.import_module("onnxruntime").RunOptions()
    timer = threading.Timer(limit, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        yield options
    except Exception as error:
        if options.terminate:
            raise StoppedError(f"the model ran longer than the {limit:g} seconds that {SECONDS} allows") from error
        raise
    finally:
        timer.cancel()
