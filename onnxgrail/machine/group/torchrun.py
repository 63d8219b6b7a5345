"""A group of processes started by `torchrun`, over torch.distributed.

Partial sums and parts of solutions travel between pairs of processes: in each round every process has one partner, so
that nobody waits in a circle.  Decisions travel along a tree away from the process that made them.  Each message begins
with a header, which can also say that the sender has failed, and why.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from onnxgrail.core import Array
from onnxgrail.errors import DeviceError, LostProcessError, UsageError
from onnxgrail.machine.amounts import whole
from onnxgrail.machine.device import Device, device_of
from onnxgrail.machine.extras import extra
from onnxgrail.machine.group.sums import EMPTY, NOWHERE, SOLO, Group, Node, push
from onnxgrail.machine.steps.codec import Record, packed, unpacked

TIMEOUT = 1800.0  # seconds to wait for another process; it may solve for long
FAREWELL = 2.0  # seconds that a failing process spends on telling the others
NODE, END, PART, TEXT, READY, RECORD, NOTHING, FAILED = range(8)
Message = tuple[tuple[int, int, int], Sequence[Array]]
"""Kind and two numbers, and arrays."""
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
        self._agreed: dict[str, bool] = {}
        self._exchanges = 0

    def collect(self, nodes: list[Node], owners: Sequence[int]) -> None:
        """Combine the partial sums of all processes: of array n in process `owners[n]`; elsewhere it becomes empty."""
        found: list[Node] = []
        for node in nodes:
            mine = [array if owner == self.rank else EMPTY for array, owner in zip(node.arrays, owners, strict=True)]
            push(found, Node(level=node.level, index=node.index, arrays=tuple(mine)))

        def give(partner: int) -> Iterator[Message]:
            for node in nodes if partner in owners else ():
                arrays = [array for array, owner in zip(node.arrays, owners, strict=True) if owner == partner]
                yield (NODE, node.level, node.index), arrays
            if partner in owners or self.rank in owners:
                yield (END, 0, 0), ()

        def take(partner: int) -> None:
            if partner not in owners and self.rank not in owners:
                return
            while (message := self._receive(partner))[0][0] == NODE:
                (_, level, index), arrays = message
                given = iter(arrays)
                placed = tuple(next(given) if owner == self.rank else EMPTY for owner in owners)
                push(found, Node(level=level, index=index, arrays=placed))

        self._meet(self.size, give, take)
        nodes[:] = found

    def exchange(
        self, arrays: Sequence[Array], count: int, places: Mapping[int, Sequence[Array]] = NOWHERE
    ) -> list[Sequence[Array]]:
        """Return the arrays of each of the first `count` processes, flat; these make the call, the others don't.

        Args:
            arrays: of this process.
            count: as above.
            places: by process, arrays in which its arrays land if they have the same sizes and types.

        Raises:
            LostProcessError: another process computes something else.
        """
        self._exchanges += 1
        found: dict[int, Sequence[Array]] = {self.rank: arrays}

        def take(partner: int) -> None:
            (kind, number, _), found[partner] = self._receive(partner, places.get(partner, ()))
            if (kind, number) != (PART, self._exchanges):
                raise LostProcessError(f"process {partner} of {self.size} came to another result", hint=CONTINUE)

        self._meet(count, lambda _: [((PART, self._exchanges, 0), arrays)], take)
        return [found[rank] for rank in range(count)]

    def agree(self, text: str) -> bool:
        """Return True if all processes give the same text; the answer is remembered."""
        if text not in self._agreed:
            mine, others = np.frombuffer(text.encode(), np.uint8), list[bytes]()

            def take(partner: int) -> None:
                others.append(b"".join(array.tobytes() for array in self._receive(partner)[1]))

            self._meet(self.size, lambda _: [((TEXT, 0, 0), [mine])], take)
            self._agreed[text] = all(other == mine.tobytes() for other in others)
        return self._agreed[text]

    def share(self, record: Record | None, source: int = 0) -> Record | None:
        """Return the record of the process `source` on every process.

        Each process first sends a message that it is ready, so that the failure of a process is noticed here.
        """
        parent, children = self._tree(source)
        for child in children:
            self._receive(child)
        if parent is None:
            body: Sequence[Array] = [] if record is None else packed(record)
        else:
            with self._watched(parent):  # does not wait: the parent may have to report that it failed
                ready = [self._torch.distributed.isend(tensor, parent) for tensor in self._message((READY, 0, 0), [])]
            _, body = self._receive(parent)
            del ready
        for child in reversed(children):  # the largest part of the tree first
            self._send(child, (RECORD if body else NOTHING, 0, 0), body)
        if parent is None or not body:
            return record if parent is None else None
        return unpacked(body)

    def _tree(self, source: int) -> tuple[int | None, list[int]]:
        """Return the process from which decisions of the process `source` come, and those to which they go on."""
        place = (self.rank - source) % self.size
        low = place & -place if place else 1 << (self.size - 1).bit_length()
        children = [place + (1 << k) for k in range(low.bit_length() - 1) if place + (1 << k) < self.size]
        parent = (place - low + source) % self.size if place else None
        return parent, [(child + source) % self.size for child in children]

    def _meet(self, count: int, give: Callable[[int], Iterable[Message]], take: Callable[[int], None]) -> None:
        """Exchange messages between all pairs of the first `count` processes.

        Nothing waits before it receives, because the partner may have to report that it failed. Only GPUs send and
        receive in the order of the calls.
        """

        def sent(partner: int) -> list[Any]:
            with self._watched(partner):
                return [
                    self._torch.distributed.isend(tensor, partner)
                    for head, body in give(partner)
                    for tensor in self._message(head, body)
                ]

        for partner in partners(self.rank, count):
            if self._carrier == "cpu" or self.rank < partner:
                work = sent(partner)
                take(partner)
            else:
                take(partner)
                work = sent(partner)
            with self._watched(partner):
                for one in work:
                    one.wait()

    def fail(self, error: BaseException) -> None:
        """Send the reason of a failure to the other processes, which may have ended themselves."""
        if isinstance(error, LostProcessError):
            told = str(error).removesuffix(f". {error.hint}")  # the others give the same hint
        else:
            told = f"process {self.rank} of {self.size} failed: {str(error) or type(error).__name__}"
        text = np.frombuffer(told.encode(), np.uint8)
        end = time.monotonic() + FAREWELL
        with contextlib.suppress(RuntimeError, ValueError):
            work = [
                self._torch.distributed.isend(tensor, rank)
                for rank in range(self.size)
                if rank != self.rank
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

    def _receive(self, rank: int, places: Sequence[Array] = ()) -> Message:
        """Receive the header and the body of a message, whose arrays land in `places` that fit.

        Raises:
            LostProcessError: the sender has ended, or reports a failure.
        """
        kind, a, b, count = (int(n) for n in self._take(rank, np.empty(4, np.int64)))
        sizes = self._take(rank, np.empty(2 * count, np.int64)).reshape(-1, 2)
        body = []
        for (size, item), place in itertools.zip_longest(sizes, places[:count]):
            fits = place is not None and (place.size, place.itemsize) == (size, item) and place.flags.c_contiguous
            body.append(self._take(rank, place if fits else np.empty(int(size), TYPES[int(item)])))
        if kind == FAILED:
            raise LostProcessError(body[0].tobytes().decode(errors="replace"), hint=CONTINUE)
        return (kind, a, b), body

    def _take(self, rank: int, array: Array) -> Array:
        """Fill an array with the next one that a process sends."""
        if array.size:
            tensor = self._torch.from_numpy(array.reshape(-1))
            place = self._way(tensor.dtype)
            with self._watched(rank):
                landed = tensor if place == "cpu" else self._torch.empty_like(tensor, device=place)
                self._torch.distributed.recv(landed, rank)
                if landed is not tensor:
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


def partners(rank: int, count: int) -> Iterator[int]:
    """Yield the other ones of `count` processes in an order in which, in every round, all meet in pairs."""
    rounds = count - 1 + count % 2  # with an odd number, a process without a partner waits
    for number in range(rounds):
        partner = (number - rank) % rounds if rank < rounds else number * (rounds + 1) // 2 % rounds
        partner = rounds if partner == rank else partner
        if partner < count:
            yield partner


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
    extra("torch.distributed", "torch", "several processes need torch")
    return extra("torch", "torch", "several processes need torch")


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
