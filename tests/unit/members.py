"""Processes of a job, played by threads: torch.distributed is replaced by mailboxes in which a sender waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from onnxgrail.machine.group.torchrun import Processes

T = TypeVar("T")
PATIENCE = 20.0  # seconds after which a message is lost


class Tensor:
    """The little of a tensor that messages need."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(is_floating_point=self.array.dtype.kind == "f")

    def to(self, _: str) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array


class Mail:
    """Messages between all members; a sender waits until its message is received, as large ones do."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], queue.Queue[tuple[np.ndarray, threading.Event]]] = {}
        self._lock = threading.Lock()

    def _box(self, source: int, target: int) -> queue.Queue[tuple[np.ndarray, threading.Event]]:
        with self._lock:
            return self._boxes.setdefault((source, target), queue.Queue())

    def torch_of(self, rank: int) -> Any:
        """The module as one member sees it."""

        def isend(tensor: Tensor, target: int) -> Any:
            done = threading.Event()
            self._box(rank, target).put((tensor.array.copy(), done))

            def wait() -> None:
                if not done.wait(PATIENCE):
                    raise RuntimeError("nobody received it")

            return SimpleNamespace(is_completed=done.is_set, wait=wait)

        def send(tensor: Tensor, target: int) -> None:
            isend(tensor, target).wait()

        def recv(tensor: Tensor, source: int) -> None:
            try:
                array, done = self._box(source, rank).get(timeout=PATIENCE)
            except queue.Empty as error:
                raise RuntimeError("nobody sent it") from error
            assert (array.dtype, array.shape) == (tensor.array.dtype, tensor.array.shape)
            tensor.array[...] = array
            done.set()

        distributed = SimpleNamespace(isend=isend, send=send, recv=recv)
        return SimpleNamespace(distributed=distributed, from_numpy=Tensor)


def played(size: int, work: Callable[[Processes], T]) -> list[T]:
    """Return the results of `work` in `size` members; one that fails tells the others, as `join` does."""
    mail = Mail()

    def member(rank: int) -> T:
        group = Processes(mail.torch_of(rank), rank, size)
        try:
            return work(group)
        except BaseException as error:
            group.fail(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(member, rank) for rank in range(size)]]
