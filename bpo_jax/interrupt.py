"""Ctrl-C that never tears a state apart."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Abort(KeyboardInterrupt):
    """A second signal, which did not wait for the end of a shielded block."""


class Interrupt:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, but not inside a shielded block.

    A signal that comes in a shielded block takes effect at its end. A second one raises `Abort` at
    once, so that a run that hangs can be stopped. Used as a context manager; outside the main
    thread, where signals cannot be handled, it does nothing.
    """

    def __init__(self) -> None:
        self._shielded = False
        self._pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """A block that runs to its end before an interrupt is raised."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
            pending, self._pending = self._pending, False
        if pending:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._shielded:
            raise KeyboardInterrupt
        if self._pending:
            raise Abort
        self._pending = True
