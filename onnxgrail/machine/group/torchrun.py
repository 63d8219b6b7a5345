"""A group of processes started by `torchrun`, over torch.distributed.

All messages travel along one tree of processes: partial sums towards the first process, decisions away from it.  Each
message begins with a header, which can also say that the sender has failed, and why.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from onnxgrail.core import Array
from onnxgrail.errors import DeviceError, LostProcessError, MissingExtraError, UsageError
from onnxgrail.machine.amounts import whole
from onnxgrail.machine.device import Device, device_of
from onnxgrail.machine.group.sums import SOLO, Group, Node, push
from onnxgrail.machine.steps.codec import Record, decode, encode

TIMEOUT = 1800.0  # seconds to wait for another process; the first one may solve for long
FAREWELL = 2.0  # seconds that a failing process spends on telling the others
NODE, END, READY, RECORD, NOTHING, FAILED = range(6)
TYPES = {1: np.uint8, 4: np.float32, 8: np.float64}  # by their bytes: those of text and records, and of sums
CONTINUE = "Start the job again; with --resume DIR it continues after the last finished block"


@contextmanager
def join(timeout: float | None = None, *, providers: Sequence[str] = ()) -> Iterator[Group]:
    """Join the processes that were started together with this one, as the environment set by `torchrun` says.

    A process that was started alone is its own group, and torch is not imported.

    Args:
        timeout: seconds to wait for another process; None takes ONNXGRAIL_TIMEOUT from the environment, or half an
            hour.
        providers: execution providers of the job: with CUDA, each process takes a GPU, and sums travel between the
            GPUs.

    Yields:
        Group: the processes.

    Raises:
        DeviceError: there is no GPU for this process.
        MissingExtraError: torch is not installed.
        UsageError: the environment is incomplete.
        LostProcessError: the other processes cannot be reached.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield SOLO
        return
    rank, wait = _number("RANK", None), timeout or float(_number("ONNXGRAIL_TIMEOUT", int(TIMEOUT)))
    torch, device = _torch(), device_of(providers)
    carrier = device.place if _has_nccl(torch, device) else "cpu"
    try:
        torch.distributed.init_process_group(
            "gloo" if carrier == "cpu" else "cpu:gloo,cuda:nccl",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=wait),
            init_method="env://",
        )
    except (RuntimeError, ValueError) as error:
        raise LostProcessError(
            f"process {rank} of {size} cannot reach the others: {_first_line(error)}",
            hint="MASTER_ADDR and MASTER_PORT must lead to process 0; GLOO_SOCKET_IFNAME picks a network interface",
        ) from error
    processes = Processes(torch, rank, size, carrier)
    try:
        yield processes
    except BaseException as error:
        processes.fail(error)
        raise
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            torch.distributed.destroy_process_group()


class Processes:
    """A group over torch.distributed.

    Sums, which are large, travel between devices (`carrier`, torch's name of a device); all else between hosts.
    """

    def __init__(self, torch: Any, rank: int, size: int, carrier: str = "cpu") -> None:
        self._torch, self._carrier = torch, carrier
        self.rank, self.size = rank, size
        low = rank & -rank if rank else 1 << (size - 1).bit_length()
        self._parent = rank - low if rank else None
        # Children in the order of their ranks, because their batches follow each other.
        self._children = [rank + (1 << k) for k in range(low.bit_length() - 1) if rank + (1 << k) < size]

    def collect(self, nodes: list[Node]) -> None:
        """Combine the partial sums of all processes in the first process."""
        for child in self._children:
            while (found := self._receive(child))[0][0] == NODE:
                (_, level, index), arrays = found
                push(nodes, Node(level=level, index=index, arrays=tuple(arrays)))
        if self._parent is not None:
            for node in nodes:
                self._send(self._parent, (NODE, node.level, node.index), node.arrays)
            self._send(self._parent, (END, 0, 0), ())

    def share(self, record: Record | None) -> Record | None:
        """Return the first process's record on every process.

        Each process first sends a message that it is ready, so that the failure of a process is noticed here.
        """
        for child in self._children:
            self._receive(child)
        if self._parent is None:
            body = [] if record is None else [np.frombuffer(encode(record), np.uint8)]
        else:
            with self._watched(self._parent):  # does not wait: the parent may have to report that it failed
                ready = [
                    self._torch.distributed.isend(tensor, self._parent) for tensor in self._message((READY, 0, 0), [])
                ]
            _, body = self._receive(self._parent)
            del ready
        for child in reversed(self._children):  # the largest part of the tree first
            self._send(child, (RECORD if body else NOTHING, 0, 0), body)
        if self._parent is None or not body:
            return record if self._parent is None else None
        return decode(body[0].tobytes())

    def fail(self, error: BaseException) -> None:
        """Send the reason of a failure to the neighbor processes, which may have ended themselves."""
        where = "" if isinstance(error, LostProcessError) else f"process {self.rank} of {self.size} failed: "
        text = np.frombuffer(f"{where}{error or type(error).__name__}".encode(), np.uint8)
        end = time.monotonic() + FAREWELL
        with contextlib.suppress(RuntimeError, ValueError):
            work = [
                self._torch.distributed.isend(tensor, rank)
                for rank in (self._parent, *self._children)
                if rank is not None
                for tensor in self._message((FAILED, 0, 0), [text])
            ]
            while time.monotonic() < end and not all(w.is_completed() for w in work):
                time.sleep(0.01)

    def _message(self, head: tuple[int, int, int], body: Sequence[Array]) -> list[Any]:
        numbers = np.array([*head, len(body)], np.int64)
        sizes = [np.array([(array.size, array.itemsize) for array in body], np.int64).ravel()] if body else []
        flat = [np.ascontiguousarray(array).reshape(-1) for array in body if array.size]
        tensors = (self._torch.from_numpy(a if a.flags.writeable else a.copy()) for a in (numbers, *sizes, *flat))
        return [tensor.to(self._way(tensor.dtype)) for tensor in tensors]

    def _way(self, dtype: Any) -> str:
        """Return the device from which tensors of a type are sent and on which they are received."""
        return self._carrier if dtype.is_floating_point else "cpu"

    def _send(self, rank: int, head: tuple[int, int, int], body: Sequence[Array]) -> None:
        with self._watched(rank):
            for tensor in self._message(head, body):
                self._torch.distributed.send(tensor, rank)

    def _receive(self, rank: int) -> tuple[tuple[int, int, int], list[Array]]:
        """Receive the header and the body of a message.

        Raises:
            LostProcessError: the sender has ended, or reports a failure.
        """
        kind, a, b, count = (int(n) for n in self._take(rank, 4, np.int64))
        sizes = self._take(rank, 2 * count, np.int64).reshape(-1, 2)
        body = [self._take(rank, int(size), TYPES[int(item)]) for size, item in sizes]
        if kind == FAILED:
            raise LostProcessError(body[0].tobytes().decode(errors="replace"), hint=CONTINUE)
        return (kind, a, b), body

    def _take(self, rank: int, size: int, dtype: Any) -> Array:
        array = np.empty(size, dtype)
        if size:
            tensor = self._torch.from_numpy(array)
            place = self._way(tensor.dtype)
            with self._watched(rank):
                landed = tensor if place == "cpu" else self._torch.empty_like(tensor, device=place)
                self._torch.distributed.recv(landed, rank)
                tensor.copy_(landed)
        return array

    @contextmanager
    def _watched(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise LostProcessError(
                f"process {rank} of {self.size} was lost: {_first_line(error)}", hint=CONTINUE
            ) from error


def _has_nccl(torch: Any, device: Device) -> bool:
    """Return True if sums can travel between GPUs; then also select this process's GPU.

    Raises:
        DeviceError: this process's GPU does not exist.
    """
    if device.kind != "cuda" or not torch.distributed.is_nccl_available() or not torch.cuda.is_available():
        return False
    if device.number >= torch.cuda.device_count():
        raise DeviceError(
            f"there is no {device.place}: torch sees {torch.cuda.device_count()} GPUs",
            hint="Name those that are there, or start fewer processes on this machine",
        )
    torch.cuda.set_device(device.number)
    return True


def _torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise MissingExtraError(
            "several processes need torch, which is not installed", hint="Run: pip install 'onnxgrail[torch]'"
        ) from error
    return torch


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    number = None if text is None else whole(text)
    if number is None:
        raise UsageError(f"the environment has {name}={text}, a number is needed", hint="Start the job with torchrun")
    return number


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
