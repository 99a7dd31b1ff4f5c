"""A second core for one run: a process that goes through the critic while this one goes through the actor.

The two networks meet in the loss alone, so their passes can run side by side, and give bit for bit what one process
gives. Threads cannot do it: an operation on 2,000 rows takes 50 microseconds, and to hand Python's lock over as long.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rlkit.arrays import as_array
from rlkit.faults import Fault
from rlkit.mlp import ByHand, StackedMLP
from rlkit.orphan import end_with_parent

AWAKE = 20_000  # looks at a semaphore, two milliseconds, before a process goes to sleep over it: waking takes long
ALIVE = 1.0  # seconds between two looks at a process that does not answer
REST = 100  # updates that are made on one core after one in which the second was busy with other work
FORWARD, BACKWARD, MORE, STOP = range(4)


class SecondCore:
    """The passes of a network as `ByHand` makes them, in a process of its own; each call begins what a later one ends.

    Both processes see the same memory. Whose turn it is say two semaphores, for which both wait awake.

    Args:
        network: whose passes they are; its weights are copied when they have moved.
        rows: most rows of a member that a pass can have.
    """

    def __init__(self, network: StackedMLP, rows: int) -> None:
        self.layers, self.rows = network.layers, rows
        members, self.inputs, _ = network.layers[0][1].shape
        self.members, self.outputs = members, network.layers[-1][1].shape[2]
        self._weights, self._grads = ([[_shared(p.shape) for p in layer] for layer in self.layers] for _ in range(2))
        self._x = _shared((members * rows * self.inputs,))
        self._y, self._by_y = (_shared((members * rows * self.outputs,)) for _ in range(2))
        self._order = _shared((2,), "q")  # what to do, on how many rows
        self._waited = self._worked = 0.0  # seconds of this update
        self._since: float | None = None  # when the other process began on something that is not fetched
        self._going_back = False
        self._rest = 0  # updates to come that do without
        context: Any = multiprocessing.get_context("fork")
        self._begin, self._end = context.Semaphore(0), context.Semaphore(0)
        passes = ByHand(self._weights, self._grads, network.num_hidden, network.activation, [], np)
        self._process = context.Process(target=self._work, args=(passes,), name="second core", daemon=True)
        self._process.start()

    def ready(self) -> bool:
        """Whether the next update should use it: not for a while after one that waited longer than it worked."""
        if self._rest:
            self._rest -= 1
        elif self._waited > self._worked:
            self._rest = REST
        self._waited = self._worked = 0.0
        return not self._rest

    def begin(self, x: Any, moved: bool) -> None:
        """Begin a forward pass of x [M, B, in].

        Args:
            moved: the network's weights may have changed since the last pass.
        """
        if self._since is not None:  # it still goes back through rows before these, and reads what is written here
            self._wait()
        if moved:
            for own, shared in zip(self.layers, self._weights, strict=True):
                for p, copy in zip(own, shared, strict=True):
                    np.copyto(copy, as_array(p.detach(), np))
        rows = x.shape[1]
        self._part(self._x, rows, self.inputs)[...] = x
        self._ask(FORWARD, rows)

    def forward(self) -> Any:
        """Return the output of the pass that was begun, [M, out, B]."""
        self._wait()
        return self._output(int(self._order[1])).copy()

    def backward(self, d: Any, more: bool) -> None:
        """Begin the backward pass of d loss / d output, [M, out, B].

        Args:
            more: add to the gradients of the rows before; else they begin anew.
        """
        self._going_back = True
        rows = d.shape[2]
        self._by_output(rows)[...] = d
        self._ask(MORE if more else BACKWARD, rows)

    def fetch(self, places: Sequence[Sequence[Tensor]]) -> None:
        """Write d loss / d each parameter to its place, if a backward pass was begun."""
        if self._since is not None:
            self._wait()
        if self._going_back:
            for own, shared in zip(places, self._grads, strict=True):
                for place, grad in zip(own, shared, strict=True):
                    np.copyto(as_array(place, np), grad)
        self._going_back = False

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._order[0] = STOP
            self._begin.release()
            self._process.join(ALIVE)
            self._process.kill()
        self._process.join()

    def _part(self, memory: Any, rows: int, size: int) -> Any:
        return memory[: self.members * rows * size].reshape(self.members, rows, size)

    def _output(self, rows: int) -> Any:
        return self._part(self._y, self.outputs, rows)

    def _by_output(self, rows: int) -> Any:
        return self._part(self._by_y, self.outputs, rows)

    def _ask(self, what: int, rows: int) -> None:
        self._order[:] = what, rows
        self._since = time.perf_counter()
        self._begin.release()

    def _wait(self) -> None:
        """Wait until the other process has done what it was asked."""
        now = time.perf_counter()
        while not (_awake(self._end) or self._end.acquire(timeout=ALIVE)):
            if not self._process.is_alive():
                raise Fault(
                    f"the process beside this one ended with status {self._process.exitcode}; processes=1 does without"
                )
        self._worked += now - (self._since or now)
        self._waited += time.perf_counter() - now
        self._since = None

    @np.errstate(all="ignore")  # what is not finite is seen by the optimiser
    def _work(self, passes: ByHand) -> None:
        """Do what is asked, in the other process, until it is to stop."""
        os.setsid()  # signals of the terminal are the run's affair, which may still finish an iteration
        end_with_parent()
        while True:
            if not _awake(self._begin):
                self._begin.acquire()
            what, rows = self._order.tolist()
            if what == STOP:
                return
            if what == FORWARD:
                self._output(rows)[...] = passes.forward(self._part(self._x, rows, self.inputs))
            else:
                passes.backward(self._by_output(rows), more=what == MORE)
            self._end.release()


def _awake(semaphore: Any) -> bool:
    """Wait for a semaphore without going to sleep; return whether it came."""
    return any(semaphore.acquire(False) for _ in range(AWAKE))


def _shared(shape: Sequence[int], kind: str = "f") -> Any:
    """Memory that a fork shares, as an array of zeros."""
    size = int(np.prod(shape))
    return np.frombuffer(multiprocessing.RawArray(kind, max(size, 1)), dtype=kind, count=size).reshape(shape)
