"""A sandbox that survives its own failures: it can be made anew and brought to where it stood.

What a policy did is never sampled again because a sandbox broke (that would favour actions that do
not break). Its recorded actions are replayed in another one, from the last snapshot or from the
start, and must be answered as they were before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from bpo_jax.sandbox import api

T = TypeVar("T")


class RecoverableSandbox:
    """The sandbox of one branch, with all it takes to make it anew.

    Its methods are called by one thread at a time, but for `close`.

    Args:
      backend: starts and forks sandboxes.
      task: what they are started for.
      snapshots: every snapshot taken is added to it; whoever owns the list releases them.
      retries: how often a broken sandbox is made anew for one action.
      seconds: how long one call may take before the sandbox counts as broken and is abandoned;
        None: as long as it takes.
    """

    def __init__(
        self,
        backend: api.Backend,
        task: api.Task,
        *,
        snapshots: list[api.Snapshot],
        retries: int = 2,
        seconds: float | None = None,
    ):
        self.backend = backend
        self.task = task
        self.snapshots = snapshots
        self.retries = retries
        self.seconds = seconds
        self.replayed = 0
        """Actions executed again so far."""
        self._sandbox: api.Sandbox | None = None
        self._history: list[tuple[str, str]] = []  # actions, and what was observed after each
        self._anchor: tuple[api.Snapshot, int] | None = None  # and how long the history was then
        self._lock = threading.Lock()
        self._closed = False

    def sibling(self) -> RecoverableSandbox:
        """Another in the same state, without a sandbox yet: it is made when it is stepped."""
        other = RecoverableSandbox(
            self.backend,
            self.task,
            snapshots=self.snapshots,
            retries=self.retries,
            seconds=self.seconds,
        )
        other._history, other._anchor = list(self._history), self._anchor
        return other

    def start(self) -> api.StepResult | api.InfraError:
        """The first observation, or why there is none after all retries."""
        with self._alone():
            error = api.InfraError("never tried")
            for _ in range(self.retries + 1):
                try:
                    self._sandbox, first = self._fresh()
                    return first
                except api.InfraError as failure:
                    error = failure
            return error

    def step(self, action: str) -> api.StepResult | api.InfraError:
        """What the action did, or why the sandbox is lost for good."""
        with self._alone():
            error = api.InfraError("never tried")
            for attempt in range(self.retries + 1):
                try:
                    # The last attempt does not trust the snapshot either.
                    last = attempt > 0 and attempt == self.retries
                    sandbox = self._live(from_start=last)
                    result = self._call(functools.partial(sandbox.step, action))
                    if result.infra_error is None:
                        self._history.append((action, result.observation))
                        return result
                    error = api.InfraError(result.infra_error)
                except api.InfraError as failure:
                    error = failure
                self._drop()
            return error

    def fork(self, siblings: Sequence[RecoverableSandbox], *, live: bool = True) -> int:
        """Takes a snapshot, from which each of `siblings` can go on.

        Where that fails, they are made by replay when they are stepped, as after any failure.

        Args:
          siblings: made by `sibling` in this state.
          live: fork a sandbox for each at once, not when it is stepped.

        Returns:
          Snapshots taken: 1, or 0 where that failed.
        """
        taken = 0
        with self._alone(), contextlib.suppress(api.InfraError):
            sandbox = self._live()
            snapshot = self._call(sandbox.snapshot, late=self.backend.release)
            if self._closed:
                # Whoever owns the list may have looked for the last time.
                self.backend.release(snapshot)
                return 0
            self.snapshots.append(snapshot)
            self._anchor = snapshot, len(self._history)
            taken = 1
            for sibling in siblings:
                sibling._anchor = self._anchor
            if live and siblings:
                k = len(siblings)
                forked = self._call(lambda: self.backend.fork(snapshot, k), late=_close_all)
                for sibling, sandbox in zip(siblings, forked, strict=True):
                    with sibling._alone():
                        sibling._sandbox = sandbox
        return taken

    def close(self) -> None:
        """Gives the sandbox up; one that is in a call is closed when the call returns."""
        self._closed = True
        self._close_if_idle()

    # Within.

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._closed:
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _drop(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            with contextlib.suppress(api.InfraError):
                within(self.seconds, sandbox.close)

    def _fresh(self) -> tuple[api.Sandbox, api.StepResult]:
        sandbox = self._call(lambda: self.backend.start(self.task), late=_close)
        try:
            first = self._call(sandbox.reset, held=sandbox)
            if first.infra_error is not None:
                raise api.InfraError(first.infra_error)
        except _Overdue:
            raise
        except BaseException:
            _close(sandbox)
            raise
        return sandbox, first

    def _live(self, *, from_start: bool = False) -> api.Sandbox:
        """The sandbox, made anew where it is lost."""
        if self._sandbox is None:
            if self._anchor is None or from_start:
                self._sandbox, _ = self._fresh()
                done = 0
            else:
                snapshot, done = self._anchor
                [self._sandbox] = self._call(
                    lambda: self.backend.fork(snapshot, 1), late=_close_all
                )
            try:
                self._replay(self._sandbox, done)
            except BaseException:
                self._drop()
                raise
        return self._sandbox

    def _replay(self, sandbox: api.Sandbox, done: int) -> None:
        for action, observed in self._history[done:]:
            result = self._call(functools.partial(sandbox.step, action))
            self.replayed += 1
            if result.infra_error is not None or result.observation != observed:
                raise api.InfraError(
                    result.infra_error
                    or f"replaying {action!r} gave {result.observation!r}, not {observed!r}"
                )

    def _call(
        self,
        call: Callable[[], T],
        *,
        late: Callable[[T], None] | None = None,
        held: api.Sandbox | None = None,
    ) -> T:
        """The call's result, waited for no longer than is allowed.

        Args:
          call: to the backend or to a sandbox.
          late: what becomes of a result that nobody waits for any more.
          held: the sandbox that the call keeps busy, to be closed when it returns too late, with a
            result or without; None: this branch's own.

        Raises:
          _Overdue: it took too long; the sandbox is another's to close now.
        """
        if self._closed:
            raise api.InfraError("the branch has been given up")
        busy = held or self._sandbox

        def close(result: T | BaseException) -> None:
            try:
                if late is not None and not isinstance(result, BaseException):
                    late(result)
            finally:
                if busy is not None:
                    _close(busy)

        try:
            return within(self.seconds, call, close)
        except _Overdue:
            self._sandbox = None
            raise


class _Overdue(api.InfraError):
    """A call to a sandbox that took too long."""


def within(
    seconds: float | None,
    call: Callable[[], T],
    late: Callable[[T | BaseException], None] | None = None,
) -> T:
    """Runs a call to a sandbox or backend, and gives up on it after `seconds`.

    Args:
      seconds: None: as long as it takes, and in this thread.
      call: goes on in a thread of its own when it has been given up on.
      late: is then called there with what came of it.

    Raises:
      InfraError: it took too long.
    """
    if seconds is None:
        return call()
    lock, done = threading.Lock(), threading.Event()
    outcome: list[T | BaseException] = []
    abandoned = False

    def run() -> None:
        try:
            result: T | BaseException = call()
        except BaseException as error:
            result = error
        with lock:
            outcome.append(result)
            done.set()
            if not abandoned:
                return
        if late is not None:
            with contextlib.suppress(Exception):
                late(result)

    threading.Thread(target=run, daemon=True).start()
    done.wait(seconds)
    with lock:
        abandoned = not outcome
    if abandoned:
        raise _Overdue(f"the sandbox did not answer within {seconds:g} seconds")
    [result] = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def _close(sandbox: api.Sandbox) -> None:
    # A sandbox that is given up may be unable to close; nothing depends on it any more.
    with contextlib.suppress(api.InfraError):
        sandbox.close()


def _close_all(sandboxes: Sequence[api.Sandbox]) -> None:
    for sandbox in sandboxes:
        _close(sandbox)
