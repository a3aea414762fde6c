"""Runs what sandboxes have to do beside the thread that wants it done.

Work on one sandbox is done in the order in which it was submitted, work on different ones at the
same time. Whoever submits never waits, and collects what is finished when it suits it.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """A piece of work that is done.

    Attributes:
      number: counts what was submitted, from 0.
      then: what was given to `Workers.submit`, to be called with `value`.
      value: what the call returned.
      error: what it raised instead.
      at: when, by `time.monotonic`.
    """

    number: int
    then: Callable[[Any], None]
    value: Any = None
    error: BaseException | None = None
    at: float = 0.0


@dataclasses.dataclass(kw_only=True, eq=False)
class _Work:
    number: int
    keys: tuple[Hashable, ...]
    call: Callable[[], Any]
    then: Callable[[Any], None]
    behind: int = 0  # how many of its keys others are still busy with


class Workers:
    """A few threads, and the order of work on each sandbox.

    Args:
      threads: how many calls run at a time; 0 runs each at once, in the thread that submits it, for
        sandboxes that answer in microseconds.
    """

    def __init__(self, threads: int):
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._chains: dict[Hashable, collections.deque[_Work]] = {}
        self._number = self._running = 0
        self._closed = False
        self.outstanding = 0
        """Pieces of work submitted and not yet collected."""
        # Daemons: a call that never returns must not keep the program from ending.
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]

    def begin(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(
        self, keys: Sequence[Hashable], call: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        """Has `call` run once everything submitted before under one of `keys` is done.

        Args:
          keys: name the sandboxes it touches.
          call: runs in another thread, unless there are none.
          then: never called here; handed back in `Finished`.
        """
        work = _Work(number=self._number, keys=tuple(keys), call=call, then=then)
        self._number += 1
        self.outstanding += 1
        if not self._threads:
            self._run(work)
            return
        with self._lock:
            for key in work.keys:
                chain = self._chains.setdefault(key, collections.deque())
                work.behind += bool(chain)
                chain.append(work)
            free = not work.behind
        if free:
            self._ready.put(work)

    def collect(self, timeout: float | None = 0.0) -> Finished | None:
        """The next piece of finished work; None where none is finished within `timeout` seconds."""
        try:
            if timeout == 0.0:
                finished = self._finished.get_nowait()
            else:
                finished = self._finished.get(timeout=timeout)
        except queue.Empty:
            return None
        self.outstanding -= 1
        return finished

    def close(self, patience: float) -> None:
        """Drops what has not begun and waits up to `patience` seconds for what has.

        A call that takes longer goes on in its thread, which then ends.
        """
        self._closed = True
        for _ in self._threads:
            self._ready.put(None)
        end = time.monotonic() + patience
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def _serve(self) -> None:
        while (work := self._ready.get()) is not None:
            if not self._closed:
                self._run(work)

    def _run(self, work: _Work) -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = work.call()
        except BaseException as raised:
            # In a thread of its own nobody else would hear of it.
            if not self._threads and not isinstance(raised, Exception):
                raise
            error = raised
        if self._threads:
            self._let_go(work)
        self._finished.put(
            Finished(
                number=work.number, then=work.then, value=value, error=error, at=time.monotonic()
            )
        )

    def _let_go(self, work: _Work) -> None:
        """Lets the next in every chain come forward."""
        freed = []
        with self._lock:
            for key in work.keys:
                chain = self._chains[key]
                chain.popleft()
                if not chain:
                    del self._chains[key]
                    continue
                chain[0].behind -= 1
                if not chain[0].behind:
                    freed.append(chain[0])
        for other in freed:
            self._ready.put(other)
