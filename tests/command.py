"""The command line, run inside a test."""

from __future__ import annotations

import re

from click.testing import CliRunner, Result

from onnxgrail.cli import main


def run(*words: object) -> Result:
    """What a command prints, and its exit code; words that are no text, such as paths, become text."""
    return CliRunner().invoke(main, [str(word) for word in words])


def said(stderr: str) -> str:
    """What a run said on stderr, without the lines that tell how long its stages took."""
    return re.sub(r"^\[ *[\d.]+ s\] .*\n", "", stderr, flags=re.MULTILINE)
