"""The command line, run inside a test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from onnxgrail.cli import main


def run(*words: object) -> Result:
    """Run a command and return its output and exit code; words of other types, such as paths, become text."""
    return CliRunner().invoke(main, [str(word) for word in words])


AMOUNTS = ("--ratio", "--sparsity", "--unit-ratio", "--max-loss", "--target-")


def sized(words: Sequence[str]) -> list[str]:
    """Return the words of a command, with a ratio if they give no amount: the default needs data and a search."""
    return [*words, *([] if any(word.startswith(AMOUNTS) for word in words) else ["--ratio", "0.3"])]


CALLS = """
import json, os, sys
from tests.command import run
found = []
for folder, *words in json.loads(sys.argv[1]):
    os.chdir(folder)
    result = run(*words)
    found.append((result.exit_code, result.stderr))
print(json.dumps(found))
"""


def in_a_process(
    calls: Sequence[tuple[Path, Sequence[str]]], setup: Callable[[], None] | None = None
) -> list[tuple[int, str]]:
    """Run commands, each in its folder, in one process of their own, since its start takes longer than most commands.

    Args:
        calls: a folder and a command's words each.
        setup: called in the process before all.

    Returns:
        Exit code and stderr of each.
    """
    words = json.dumps([[str(folder), *call] for folder, call in calls])
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, words],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=setup,
    )
    assert done.returncode == 0, done.stderr
    return [(code, stderr) for code, stderr in json.loads(done.stdout)]


def said(stderr: str) -> str:
    """Return what a run wrote to stderr, without the lines with the times of its stages."""
    return re.sub(r"^\[ *[\d.]+ s\] .*\n", "", stderr, flags=re.MULTILINE)
