"""Select the blocks that a recipe narrows, by kind and by the regular expressions of `--include` and `--exclude`.

Recipes of others contain such expressions, so they have a time limit.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from onnxgrail.core import Block, Recipe
from onnxgrail.errors import UsageError

SECONDS = 10.0  # time limit for all matches of a pattern together


class Pattern:
    """The regular expression of an option."""

    def __init__(self, option: str, text: str) -> None:
        """Compile the regular expression.

        Args:
            option: name of the option, for messages.
            text: the regular expression.

        Raises:
            UsageError: it is not a regular expression.
        """
        self._name, self._left = f"--{option} {_short(text)}", SECONDS
        try:
            self._pattern = re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise UsageError(f"{self._name} is not a regular expression: {why}") from error

    def matches(self, names: Sequence[str]) -> bool:
        """Return True if the pattern matches at least one of the names.

        Raises:
            UsageError: matching takes too long.
        """
        started = time.monotonic()
        try:
            with _deadline(max(self._left, 0.001)):
                return any(self._pattern.search(name) for name in names if name)
        except _LateError as error:
            raise UsageError(
                f"{self._name} takes more than {SECONDS:g} seconds on the names of this model",
                hint="Write it without repetitions inside of repetitions, such as (a+)+",
            ) from error
        finally:
            self._left -= time.monotonic() - started


class _LateError(Exception):
    pass


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_LateError` in a match that takes too long.

    There is no limit outside the main thread, which gets no signals, or if the program uses the alarm itself.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return

    def late(*_: object) -> None:
        raise _LateError

    signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def selected(blocks: Sequence[Block], recipe: Recipe) -> tuple[Block, ...]:
    """Return the blocks of the chosen kinds with a name that matches `include` and no name that matches `exclude`.

    The names of a block are its own name and those of its nodes.

    Raises:
        UsageError: a pattern is not a regular expression.
    """
    if "grail" not in recipe.method or recipe.only_bits:
        return ()
    wanted = named(recipe)
    return tuple(b for b in blocks if b.kind in recipe.blocks and wanted((b.name, *b.nodes)))


def named(recipe: Recipe) -> Callable[[Sequence[str]], bool]:
    """Return a function that is True for names of which one matches `include` and none matches `exclude`.

    Raises:
        UsageError: a pattern is not a regular expression.
    """
    include, exclude = (
        None if text is None else Pattern(option, text)
        for option, text in (("include", recipe.include), ("exclude", recipe.exclude))
    )

    def wanted(names: Sequence[str]) -> bool:
        return (include is None or include.matches(names)) and (exclude is None or not exclude.matches(names))

    return wanted
