"""An engine without a model, and sandboxes that are slow and break."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from bpo_jax.rollout.api import Answer, Branch, Ids, Turn
from bpo_jax.sandbox.api import InfraError, StepResult, Task
from tests.rollout import toys


def _unit(*parts) -> float:
    """In [0, 1), a function of `parts`."""
    word = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") / 2**64


@dataclasses.dataclass
class _Said:
    ids: list[int]
    seed: int
    asked: tuple | None = None
    steps: int = 0  # until it is answered
    read: bool = False


class Engine:
    """Token t of a branch is a hash of its seed, of t and of all before it.

    Args:
      slots: of branches.
      entropy: of the next token, given the context; None: a hash of it, from 0 to 2.
      delays: how many steps an answer may take, drawn anew for each.
      order: seeds the order of answers within a step; None: that of asking.
      salt_from: tokens from this position on are others.
      events: a record of ("open" | "fork" | "say" | "free", branch).
      fails_at: the step that raises, and what.
    """

    def __init__(
        self,
        *,
        slots: int = 64,
        entropy: Callable[[Sequence[int]], float] | None = None,
        delays: int = 0,
        order: int | None = None,
        salt_from: int | None = None,
        events: list[tuple] | None = None,
        fails_at: tuple[int, BaseException] | None = None,
    ):
        self.temperature = 1.0
        self.slots = slots
        self.entropy = entropy or (lambda ids: 2.0 * _unit("entropy", tuple(ids)))
        self.delays = delays
        self.random = random.Random(order)
        self.shuffled = order is not None
        self.salt_from = salt_from
        self.events = events if events is not None else []
        self.fails_at = fails_at
        self.branches: dict[Branch, _Said] = {}
        self.next = self.steps = self.decoded = 0

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.branches)

    def open(self, prompt_ids: Ids, seed: int) -> Branch:
        assert self.free_slots > 0 and len(prompt_ids)
        self.branches[self.next] = _Said([int(i) for i in prompt_ids], seed)
        self.events.append(("open", self.next))
        self.next += 1
        return self.next - 1

    def extend(self, branch: Branch, ids: Ids) -> None:
        said = self._idle(branch)
        said.ids += [int(i) for i in ids]
        said.read = False

    def fork(self, branch: Branch, seeds: Sequence[int]) -> list[Branch]:
        said = self._idle(branch)
        assert said.read, "a branch has to be read before it can fork"
        self.events.append(("fork", branch))
        made = []
        for seed in seeds:
            made.append(self.open(said.ids, seed))
            self.branches[made[-1]].read = True
        return made

    def free(self, branch: Branch) -> None:
        del self.branches[branch]
        self.events.append(("free", branch))

    def length(self, branch: Branch) -> int:
        return len(self.branches[branch].ids)

    def read(self, branch: Branch) -> None:
        self._ask(branch, ("read",))

    def say(self, branch: Branch, limit: int, markers: Sequence[str] = ()) -> None:
        assert limit >= 1
        self.events.append(("say", branch))
        self._ask(branch, ("say", limit, tuple(markers)))

    def step(self) -> list[Answer]:
        self.steps += 1
        if self.fails_at is not None and self.steps == self.fails_at[0]:
            raise self.fails_at[1]
        answers = []
        for branch, said in self.branches.items():
            if said.asked is None:
                continue
            if said.steps:
                said.steps -= 1
            elif said.asked[0] == "read":
                answers.append(Answer(branch=branch, entropy=self.entropy(said.ids)))
                said.asked, said.read = None, True
            else:
                answers.append(Answer(branch=branch, turn=self._turn(said, *said.asked[1:])))
                said.asked, said.read = None, False
        if self.shuffled:
            self.random.shuffle(answers)
        return answers

    def set_weights(self, params, version) -> None:
        raise NotImplementedError

    def _turn(self, said: _Said, limit: int, markers: Sequence[str]) -> Turn:
        ids: list[int] = []
        finish = "length"
        while len(ids) < limit:
            t = len(said.ids)
            salt = self.salt_from is not None and t >= self.salt_from
            word = _unit(said.seed, t, salt, tuple(said.ids))
            ids.append(toys.STOP if word < 0.25 else 4 + int(word * 1e6) % 20)
            said.ids.append(ids[-1])
            if ids[-1] == toys.STOP:
                finish = "stop"
                break
            text = toys.NumberDialogue().text(ids)
            if any(marker in text for marker in markers):
                finish = "marker"
                break
        self.decoded += len(ids)
        floats = np.full(len(ids), -1.0, np.float32)
        return Turn(
            token_ids=np.array(ids, np.int32), logprobs=floats, entropies=-floats, finish=finish
        )

    def _ask(self, branch: Branch, what: tuple) -> None:
        said = self._idle(branch)
        said.asked = what
        said.steps = self.random.randint(0, self.delays)

    def _idle(self, branch: Branch) -> _Said:
        said = self.branches[branch]
        assert said.asked is None, "the branch is asked for something already"
        return said


class SlowEnvironment(toys.ScriptedEnvironment):
    """Sandboxes that work in threads.

    Args:
      delay: seconds that a call takes, given the task's id and the actions so far.
      failing: probability that a call fails, drawn from `seed` in the order of the calls.
    """

    inline = False

    def __init__(
        self,
        *,
        delay: Callable[[str, int], float] = lambda task, turns: 0.0,
        failing: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        self.delay = delay
        self.failing = failing
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.log: list[tuple[str, float]] = []

    def call(self, task: str, turns: int) -> None:
        time.sleep(self.delay(task, turns))
        with self.lock:
            self.log.append((task, time.monotonic()))
            fails = self.random.random() < self.failing
        if fails:
            raise InfraError("the machine is gone")

    def start(self, task: Task):
        self.call(task.id, 0)
        with self.lock:
            return SlowSandbox(self, task)

    def fork(self, snapshot, k):
        task_id, past = snapshot
        self.call(task_id, len(past))
        with self.lock:
            return [SlowSandbox(self, Task(id=task_id, kind="toy"), past) for _ in range(k)]

    def release(self, snapshot) -> None:
        with self.lock:
            self.released += 1
        if self.random.random() < self.failing:
            raise InfraError("the machine is gone")


class SlowSandbox(toys.ScriptedSandbox):
    environment: SlowEnvironment
    busy = False

    def reset(self) -> StepResult:
        self.environment.call(self.task.id, 0)
        return super().reset()

    def step(self, action: str) -> StepResult:
        assert not self.busy, "two calls to one sandbox at a time"
        self.busy = True
        try:
            self.environment.call(self.task.id, len(self.past))
            with self.environment.lock:
                return super().step(action)
        finally:
            self.busy = False

    def snapshot(self):
        assert not self.busy
        self.environment.call(self.task.id, len(self.past))
        with self.environment.lock:
            return super().snapshot()

    def close(self) -> None:
        with self.environment.lock:
            super().close()
            fails = self.environment.random.random() < self.environment.failing
        if fails:
            raise InfraError("the machine is gone")
