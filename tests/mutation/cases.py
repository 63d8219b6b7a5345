"""One mutation by its number: files in a folder, and the command that reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx

from tests.command import sized
from tests.mutation.feeds import broken
from tests.mutation.gentle import GENTLE
from tests.mutation.protos import PLAIN, pick
from tests.mutation.seeds import SEEDS, data_of
from tests.mutation.traps import TRAPS, external
from tests.mutation.wire import WIRE

Rng = np.random.Generator
BAD, GOOD, OUT = "m.onnx", "good.onnx", "out.onnx"
OPTIONS = (
    (),
    (),
    ("--unit-ratio", "0.5", "--round-to", "1"),
    ("--round-to", "1", "--blocks", "conv,mlp,heads,stream"),
    ("--reducer", "fold", "--round-to", "1"),
    ("--save-as-external-data",),
    ("--kv-io", "--compensate", "grail"),
    ("--compensate", "none", "--selector", "l2", "--round-to", "1"),
    ("--allocate", "global", "--round-to", "1"),
    ("--norms", "all", "--round-to", "1"),
    ("--target-params", "70%"),
    ("--report", "out.html", "--report", "out.json"),
    ("--dry-run", "--json"),
    ("--batch-size", "1", "--round-to", "1"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A call to run, and its name.

    Attributes:
        name: what it is called.
        words: the command, or for `call` what is told of it.
        call: run instead of the command.
        own: files and folders that the case may change.
    """

    name: str
    words: tuple[str, ...]
    call: Callable[[], object] | None = None
    own: tuple[str, ...] = ()


def prepare(_: Path) -> None:
    """Nothing is needed before the first case."""


def case(seed: int, number: int, folder: Path) -> Case:
    """Write the files of a mutation to an empty folder; the same numbers always give the same files."""
    rng = np.random.default_rng((seed, number))
    name = pick(SEEDS, rng)
    model = onnx.ModelProto.FromString(_good(name))
    arrays = data_of(model)
    (folder / GOOD).write_bytes(_good(name))
    np.savez(folder / "d.npz", **arrays)
    share = rng.random()
    if share < 0.15:
        (folder / BAD).write_bytes(_good(name))
        return Case(f"{name}: data", _compress(broken(arrays, folder, rng), rng))
    if share < 0.25:
        external(model, folder, rng)
        (folder / BAD).write_bytes(model.SerializeToString())
        return Case(f"{name}: external", _command(rng))
    steps: list[str] = []
    data = model.SerializeToString()
    gentle = rng.random() < 0.4
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        change = pick(GENTLE if gentle else (*WIRE, *PLAIN, *PLAIN, *TRAPS), rng)
        data = _changed(change, data, rng)
        steps.append(change.__name__)
        if not data:
            break
    (folder / BAD).write_bytes(data)
    return Case(f"{name}: {', '.join(steps)}", _command(rng))


@cache
def _good(name: str) -> bytes:
    return SEEDS[name]().SerializeToString()


def _changed(change: Callable[..., bytes | None], data: bytes, rng: Rng) -> bytes:
    if change in WIRE:
        made = change(data, rng)
        assert made is not None
        return made
    try:
        model = onnx.ModelProto.FromString(data)
        change(model, rng)
        return model.SerializeToString()
    except Exception:  # noqa: BLE001  an earlier change left nothing that this one could take hold of
        return data


def _command(rng: Rng) -> tuple[str, ...]:
    share = rng.random()
    if share < 0.6:
        return _compress("d.npz" if rng.random() < 0.5 else "", rng)
    if share < 0.8:
        return ("inspect", BAD, *pick(((), ("--json",), ("--html", "out.html"), ("--verbose",)), rng))
    if share < 0.85:
        return ("apply", BAD, GOOD, "--output", OUT, "--data", "d.npz")
    pair = (BAD, GOOD) if rng.random() < 0.5 else (GOOD, BAD)
    return ("compare", *pair, *(("--data", "d.npz") if rng.random() < 0.5 else ("--samples", "4")))


def _compress(data: str, rng: Rng) -> tuple[str, ...]:
    source = ("--data", data) if data else ("--samples", "4")
    return ("compress", BAD, OUT, *source, *sized(pick(OPTIONS, rng)))
