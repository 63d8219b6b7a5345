"""Time of every kernel of a model in ONNX Runtime."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.runtime.measured import duration, once
from onnxgrail.calibration.runtime.session import Session, Setup, open_session
from onnxgrail.calibration.runtime.timing import take_turns
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.serial import Packed
from onnxgrail.machine.files.temporary import scratch
from onnxgrail.machine.steps.codec import Codec, Record

WARM, LEAST, MOST = 3, 10, 40  # runs of each model
SECONDS = 4.0  # time spent on all models once there are enough runs
QUIET = 10  # percentile of the runs: other programs interrupt a whole run often, a single kernel rarely
LARGEST = 2**28  # bytes of a profile; a loop writes an entry per kernel and pass
KERNEL = "_kernel_time"  # end of an entry's name

Event = Mapping[str, Any]
Shape = tuple[int, ...]
_Key = tuple[str, str, str]  # name, operator, number


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A node of the graph that ONNX Runtime runs after its optimizations.

    Attributes:
        name: of the node; the runtime names a fused node after one of its nodes, or after an output.
        op: operator, perhaps of the runtime's own.
        ms: milliseconds per undisturbed run of the model, without those of nodes in its bodies.
        took, gave: shapes of the first input and output.
    """

    name: str
    op: str
    ms: float
    took: Shape
    gave: Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The kernels of a model in the order of execution, and the milliseconds of an undisturbed run."""

    kernels: tuple[Kernel, ...]
    ms: float


def profiles_of(sources: Sequence[Packed], feeds: Sequence[Feed], *, providers: Sequence[str]) -> tuple[Profile, ...]:
    """Return the profiles of several models, each on its feed, measured alternately and once per machine.

    Raises:
        ModelError: ONNX Runtime does not load or run a model, or its profile cannot be read.
    """
    return once("kernels", sources, feeds, providers, lambda: _profiled(sources, feeds, providers), PROFILES)


def _profiled(sources: Sequence[Packed], feeds: Sequence[Feed], providers: Sequence[str]) -> tuple[Profile, ...]:
    plain = Setup(providers=providers, timed=True)
    with scratch() as folder, ExitStack() as stack:
        sessions: list[Session] = []
        for number, source in enumerate(sources):
            place = folder / str(number)
            place.mkdir()
            # A plain run before every profiled one: the code that profiles is in no cache then, for any of the models.
            sessions += [
                stack.enter_context(open_session(source, one)) for one in (plain, replace(plain, profile=place))
            ]
        twice = [feed for feed in feeds for _ in range(2)]
        times = take_turns(sessions, twice, least=LEAST, most=MOST, seconds=SECONDS, warm=WARM)
        files = [session.end_profile() for session in sessions[1::2]]
        plain_ms = np.percentile(times[::2], QUIET, axis=1).tolist()
        return tuple(_profile(_events(file), ms) for file, ms in zip(files, plain_ms, strict=True))


def _profile(events: Sequence[Event], plain_ms: float) -> Profile:
    """Return a profile; on a busy machine, the sum of short intervals is less disturbed than whole runs."""
    kernels, between = kernels_in(events)
    return Profile(kernels=kernels, ms=min(plain_ms, sum(kernel.ms for kernel in kernels) + between))


def kernels_in(events: Sequence[Event]) -> tuple[tuple[Kernel, ...], float]:
    """Return the kernels in a profile, and the milliseconds per run between kernels.

    Args:
        events: the entries of the file that ONNX Runtime writes.
    """
    runs = sorted(float(e["ts"]) for e in events if e.get("name") == "model_run")
    nodes = sorted((e for e in events if str(e.get("name", "")).endswith(KERNEL)), key=lambda e: (e["ts"], -e["dur"]))
    spent: dict[_Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    gaps: dict[_Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    first: dict[_Key, Event] = {}
    for event, own, gap in _own(nodes):
        about = event.get("args", {})
        key = (event["name"].removesuffix(KERNEL), about.get("op_name", ""), str(about.get("node_index", "")))
        run = int(np.searchsorted(runs, event["ts"], side="right"))
        spent[key][run] += own
        gaps[key][run] += gap
        if run > WARM:
            first.setdefault(key, event)
    measured = range(WARM + 1, len(runs) + 1)

    def ms(times: Mapping[int, float]) -> float:
        return _undisturbed([times.get(run, 0.0) for run in measured]) / 1e3

    kernels = tuple(
        Kernel(
            name=key[0],
            op=key[1],
            ms=ms(spent[key]),
            took=_shape(event, "input_type_shape"),
            gave=_shape(event, "output_type_shape"),
        )
        for key, event in first.items()
    )
    return kernels, sum(ms(gaps[key]) for key in list(first)[1:])


def _undisturbed(times: Sequence[float]) -> float:
    """Return the mean without the longest quarter; a median would be a whole number of microseconds."""
    return float(np.mean(sorted(times)[: max(1, 3 * len(times) // 4)]))


def _own(nodes: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Yield the entries of nodes with their own time and the time since the last one, in microseconds.

    Args:
        nodes: by start, the longer first; the time of a node includes that of nodes in its bodies.
    """
    inside: dict[int, float] = defaultdict(float)
    around: list[int] = []
    gaps: list[float] = []
    for number, event in enumerate(nodes):
        last = around[-1] if around else None
        while around and _end(nodes[around[-1]]) < _end(event):
            last = around.pop()
        if around:
            inside[around[-1]] += event["dur"]
        gaps.append(max(0.0, event["ts"] - _end(nodes[last])) if last is not None and not around else 0.0)
        around.append(number)
    for number, event in enumerate(nodes):
        yield event, max(0.0, event["dur"] - inside[number]), gaps[number]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _shape(event: Event, entry: str) -> Shape:
    """Return the shape of the first tensor in an entry such as [{"float": [1, 8]}]."""
    for tensor in event.get("args", {}).get(entry, ()):
        for shape in tensor.values():
            return tuple(shape)
    return ()


def _events(path: Path) -> list[Event]:
    if path.stat().st_size > LARGEST:
        raise ModelError("ONNX Runtime's profile is too long")
    try:
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:  # names are written as they are, with their quotation marks
        raise ModelError(f"ONNX Runtime's profile cannot be read: {error}") from error
    return [event for event in events if isinstance(event, dict)]


def _record(profiles: Sequence[Profile]) -> Record:
    rows = [[[k.name, k.op, k.ms, k.took, k.gave] for k in profile.kernels] for profile in profiles]
    return Record(notes={"ms": [profile.ms for profile in profiles], "kernels": rows})


def _restored(record: Record) -> tuple[Profile, ...]:
    return tuple(
        Profile(
            kernels=tuple(
                Kernel(name=str(name), op=str(op), ms=duration(own), took=_sizes(took), gave=_sizes(gave))
                for name, op, own, took, gave in rows
            ),
            ms=duration(ms),
        )
        for ms, rows in zip(record.notes["ms"], record.notes["kernels"], strict=True)
    )


def _sizes(shape: Sequence[Any]) -> Shape:
    return tuple(map(int, shape))


PROFILES = Codec(_record, _restored)
"""The storage format of profiles, for `once`."""
