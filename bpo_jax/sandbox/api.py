"""The contracts between environments, sandboxes and whoever steps them.

A *sandbox* is a live copy of an environment: it steps, can be snapshotted, and siblings forked from
one snapshot are independent. Nothing here, in a backend or in an environment imports JAX: a worker
process that has touched JAX cannot fork safely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from bpo_jax.action_formats import InvalidAction as InvalidAction

Snapshot = Any
"""An opaque, immutable handle of one state; only the backend that made it can read it."""

Message = dict[str, str]
"""One chat message: ``{"role": "system" | "user" | "assistant", "content": text}``."""


class InfraError(RuntimeError):
    """A sandbox failed for a reason that is not the policy's: never a reward, retried or masked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one action did.

    Attributes:
      observation: the text shown to the policy.
      reward: earned by this action.
      done: the task ended by its own rule.
      truncated: the task ended by a limit of its own.
      infra_error: what broke, where something did; then the other fields mean nothing.
      info: ``won``, ``admissible`` and the like.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    infra_error: str | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem of an environment.

    Attributes:
      id: stable and unique within the environment; enough to find the task again.
      kind: the group it is reported under (for ALFWorld one of the six task types).
      payload: what the environment needs to start it.
    """

    id: str
    kind: str
    payload: Any = None


class TaskIterator(Protocol):
    """An endless or finite stream of tasks that can be saved and resumed."""

    def __iter__(self) -> TaskIterator: ...

    def __next__(self) -> Task: ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready position in the stream."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Sandbox(Protocol):
    """A live copy of an environment."""

    def reset(self) -> StepResult:
        """The first observation; called once, before any step."""
        ...

    def step(self, action: str) -> StepResult: ...

    def snapshot(self) -> Snapshot: ...

    def state_hash(self) -> str: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Starts and forks sandboxes.

    Attributes:
      inline: its sandboxes answer in microseconds and are not worth a thread.
    """

    @property
    def inline(self) -> bool: ...

    def start(self, task: Task) -> Sandbox: ...

    def fork(self, snapshot: Snapshot, k: int) -> list[Sandbox]: ...

    def release(self, snapshot: Snapshot) -> None: ...


class Demonstrator(Protocol):
    """A policy with privileged knowledge of one task, for warm start and as an upper bound."""

    def act(self, observation: str) -> str:
        """The next action, given the newest observation."""
        ...

    def mistake(self) -> str:
        """An action that may be tried here in vain; `act` goes on as if it had not been."""
        ...


class Environment(Protocol):
    """A task family."""

    max_turns: int

    def tasks(self, split: str, seed: int) -> TaskIterator:
        """An endless, seeded stream for "train"; a finite, ordered one for evaluation splits."""
        ...

    def start(self, task: Task) -> Sandbox: ...

    def prompt(self, task: Task, first_observation: str) -> Sequence[Message]:
        """The chat messages the policy reads before its first turn."""
        ...

    def parse(self, text: str) -> str | InvalidAction:
        """The action in a sampled turn."""
        ...

    def turn(self, command: str) -> str:
        """A turn that `parse` reads as the command; what a policy is cloned from."""
        ...

    def expert(self, task: Task, seed: int) -> Demonstrator | None:
        """A demonstrator for the task, or None where there is none."""
        ...
