"""Sandboxes that live in this process, for environments whose whole state is a small value.

The snapshot of such a sandbox is an immutable object that can rebuild it, so a fork is one
constructor call: no process, no file, microseconds.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

from bpo_jax.sandbox import api


class Restorable(Protocol):
    """A snapshot that holds everything its sandbox needs."""

    def restore(self) -> api.Sandbox:
        """A new sandbox in the state of the snapshot; it shares nothing that can change."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcessBackend:
    """The `api.Backend` of an environment whose snapshots are `Restorable`.

    Attributes:
      environment: the task family that starts the sandboxes.
    """

    environment: api.Environment
    inline: ClassVar[bool] = True

    def start(self, task: api.Task) -> api.Sandbox:
        """A fresh sandbox of the task; call its `reset` before any step."""
        return self.environment.start(task)

    def fork(self, snapshot: Restorable, k: int) -> list[api.Sandbox]:
        """`k` independent sandboxes in the state of `snapshot`, ready to step.

        Raises:
          ValueError: if `k` is less than one.
        """
        if k < 1:
            raise ValueError(f"a fork needs at least one sandbox, got k={k}")
        return [snapshot.restore() for _ in range(k)]

    def release(self, snapshot: Restorable) -> None:
        """Nothing to give back: the snapshot is an ordinary value."""
