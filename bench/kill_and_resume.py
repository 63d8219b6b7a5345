"""Kill `onnxgrail compress --resume` at random moments, continue it, and compare the result with an unkilled run.

    python bench/kill_and_resume.py [--moments 20] [--seed 0] [--model M.onnx --data D] [-- options of compress]

After every kill the input must be unchanged, and the only other files may be the folder of `--resume` and, if the kill
came after the end, the complete output.  After continuing, the output must have the bytes of the unkilled run, and a
third run must write them again.  Half of the moments are uniform over the time of a run, the other half over the
number of finished steps, because most of a short run is its start.  Prints JSON; exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[1] / "models" / "data"
OUTPUT, KEPT = "small.onnx", "kept"
LIMIT = 600.0  # seconds that a run may take


class RunError(Exception):
    """A run that was not killed failed; the message has its exit code and its stderr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A compression command; its input is a copy of `model` and `data`."""

    model: Path = MODELS / "digits_vit.onnx"
    data: Path = MODELS / "digits_vit.calib.npz"
    options: tuple[str, ...] = ("--ratio", "0.3")

    def lay_out(self, folder: Path) -> None:
        """Copy the input into an empty folder."""
        for path in (self.model, self.data):
            shutil.copy(path, folder / path.name)

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start the command in a folder."""
        words = [self.model.name, OUTPUT, "--data", self.data.name, "--resume", KEPT, "--quiet", *self.options]
        return subprocess.Popen(
            [sys.executable, "-m", "onnxgrail", "compress", *words], cwd=folder, stderr=subprocess.PIPE
        )

    def finish(self, folder: Path) -> str:
        """Run the command in a folder to its end; return the checksum of its output."""
        process = self.start(folder)
        errors = process.communicate(timeout=LIMIT)[1]
        if process.returncode:
            raise RunError(f"exit code {process.returncode}, stderr {errors.decode(errors='replace')!r}")
        return checksum(folder / OUTPUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment to kill a run: `seconds` after the start, or as soon as `steps` are finished."""

    seconds: float = LIMIT
    steps: int | None = None

    def wait(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Wait for the moment, or for the end of the process."""
        end = time.monotonic() + self.seconds
        while process.poll() is None and time.monotonic() < end:
            if self.steps is not None and finished(folder) >= self.steps:
                return
            time.sleep(0.002)


def checksum(path: Path) -> str:
    """Return the checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finished(folder: Path) -> int:
    """Return the number of stored steps."""
    return len(list((folder / KEPT / "steps").glob("*.npz")))


def killed(command: Command, moment: Moment, folder: Path, wanted: str) -> dict[str, Any]:
    """Kill at a moment, continue, run a third time; return the state after the kill and the failed checks."""
    command.lay_out(folder)
    before = {path.name: checksum(path) for path in folder.iterdir()}
    process = command.start(folder)
    started = time.monotonic()
    moment.wait(process, folder)
    process.kill()
    process.communicate(timeout=LIMIT)
    found = {"seconds": round(time.monotonic() - started, 3), "steps": finished(folder)}
    found |= {"broken": [], "errors": []}
    found["output"] = (folder / OUTPUT).exists()
    allowed = {*before, KEPT, *([OUTPUT] if found["output"] else [])}

    def check(what: str, holds: bool) -> None:
        if not holds:
            found["broken"].append(what)

    def check_run(what: str) -> None:
        try:
            check(what, command.finish(folder) == wanted)
        except RunError as error:
            check(what, holds=False)
            found["errors"].append(f"{what}: {error}")

    check("nothing beside the output after the kill", {p.name for p in folder.iterdir()} <= allowed)
    check("a whole output after the kill, or none", not found["output"] or checksum(folder / OUTPUT) == wanted)
    check_run("the same bytes after going on")
    check_run("the same bytes once more")
    check("nothing beside the output at the end", {p.name for p in folder.iterdir()} == {*before, KEPT, OUTPUT})
    check("the input as it was", all(checksum(folder / name) == known for name, known in before.items()))
    return found


def unkilled(command: Command) -> tuple[str, float, int]:
    """Return the checksum of the output of an unkilled run, its seconds, and its steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command.lay_out(folder)
        started = time.monotonic()
        wanted = command.finish(folder)
        return wanted, time.monotonic() - started, finished(folder)


def moments(count: int, seed: int, seconds: float, steps: int) -> list[Moment]:
    """Return random moments of a run."""
    rng = random.Random(seed)
    return [
        Moment(seconds=rng.uniform(0, 1.05 * seconds)) if number % 2 else Moment(steps=rng.randint(0, steps))
        for number in range(count)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=Command().model)
    parser.add_argument("--data", type=Path, default=Command().data)
    parser.add_argument("options", nargs="*", help="of compress")
    args = parser.parse_args(arguments)
    command = Command(
        model=args.model.resolve(), data=args.data.resolve(), options=tuple(args.options) or Command().options
    )
    wanted, seconds, steps = unkilled(command)
    rows = []
    for moment in moments(args.moments, args.seed, seconds, steps):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(killed(command, moment, Path(folder), wanted))
    broken = sorted({promise for row in rows for promise in row["broken"]})
    head = {"model": args.model.name, "options": list(command.options), "threads": os.environ.get("OMP_NUM_THREADS")}
    print(json.dumps({**head, "seconds": round(seconds, 2), "steps": steps, "broken": broken, "kills": rows}, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
