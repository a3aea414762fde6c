"""Grows many trees at once, in rounds of a fixed order.

A round takes every branch that has a slot one turn further: compute what it has read, measure the
entropy of what it would say next, decide and pay for forks, make the siblings, sample all branches
in one batch, execute their actions. Branches without a slot wait; none is cut or dropped. The same
arguments give the same trees.

With several engines, one per device, tasks are dealt out among them and grown side by side.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpo_jax.ledger import Ledger
from bpo_jax.rollout.api import Branch, Engine, Turn
from bpo_jax.rollout.branching import Branching, Budget, Path
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.rollout.rounds import read_all, say_all
from bpo_jax.sandbox import api
from bpo_jax.tree import Action, Decision, End, Tree

logger = logging.getLogger(__name__)

WAITING: Branch = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a trajectory may use. All but `retries` are the task's: reaching one is an outcome.

    Attributes:
      max_turns: turns of a trajectory; the environment's own limit holds as well.
      max_turn_tokens: tokens of a turn.
      context: tokens of a trajectory, what was read and what was sampled. A trajectory that has no
        room for a full turn left ends as truncated.
      retries: how often a broken sandbox is rebuilt for one action before the leaf is masked.
      invalid_penalty: subtracted from the reward of a turn in which no action can be read, or whose
        action the sandbox refuses (``info["invalid"]``); what the environment itself charges for
        the first comes on top.
    """

    max_turns: int
    max_turn_tokens: int
    context: int
    retries: int = 2
    invalid_penalty: float = 0.0


@dataclasses.dataclass(kw_only=True, eq=False)
class _Growing:
    """A tree under way: its task, its budget, its snapshots and its open branches."""

    task: api.Task
    tree: Tree
    budget: Budget
    snapshots: list[api.Snapshot] = dataclasses.field(default_factory=list)
    open: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class _Line:
    """A branch under way.

    Attributes:
      decision: where it stands; `planned` once the number of its children is settled.
      path: how it came here.
      ids: every token of the branch, from which a waiting branch is opened.
      history: executed actions and what was observed after each, from the start of the task.
      anchor: the last snapshot on the path and the length of `history` when it was taken.
      handle: the engine's, `WAITING` while there is no slot for it.
      sandbox: None where it has to be rebuilt before the next action.
    """

    home: _Growing
    decision: Decision
    path: Path
    ids: list[np.ndarray]
    history: list[tuple[str, str]]
    anchor: tuple[api.Snapshot, int] | None = None
    handle: Branch = WAITING
    sandbox: api.Sandbox | None = None
    planned: bool = False


class Grower:
    """Grows trees of an environment with an engine.

    Args:
      environment: the task family.
      backend: starts and forks its sandboxes.
      engines: sample; their slots bound how many branches run at a time. A tree grows on one.
      dialogue: turns messages into token ids.
      limits: of every trajectory.
    """

    def __init__(
        self,
        *,
        environment: api.Environment,
        backend: api.Backend,
        engines: Sequence[Engine],
        dialogue: Dialogue,
        limits: Limits,
    ):
        self.environment = environment
        self.backend = backend
        self.engines = engines
        self.dialogue = dialogue
        self.limits = limits

    def grow(
        self,
        tasks: Sequence[api.Task],
        *,
        roots: int,
        rule: Branching,
        seed: int,
        temperature: float,
        ledger: Ledger,
    ) -> list[Tree]:
        """One tree per task.

        Evaluation is the same with one root, a rule that places nothing and its own ledger.

        Args:
          tasks: in the order of the result; a task may occur more than once.
          roots: M, trajectories that start at each task's first decision.
          rule: where to branch; read here, never updated.
          seed: of the sampling. A tree's tokens depend on it, on the task's id and on the policy.
          temperature: of the sampling, 0 for greedy.
          ledger: what is spent is added to it.

        Returns:
          Trees in the order of `tasks`. A task whose sandbox could not be started, or whose prompt
          leaves no room for a turn, gives a tree without actions, and ``info["error"]`` says why.
        """
        seeded = list(zip(tasks, _task_seeds(tasks, seed), strict=True))
        ways = min(len(self.engines), max(len(tasks), 1))
        growths: list[_Growth] = []
        stopped = threading.Event()
        for part, engine in enumerate(self.engines[:ways]):
            engine.temperature = temperature
            growths.append(_Growth(self, engine, seeded[part::ways], roots, rule, stopped))
        if ways == 1:
            grown = [growths[0].run()]
        else:
            with concurrent.futures.ThreadPoolExecutor(ways) as pool:
                under_way = [pool.submit(growth.run) for growth in growths]
                try:
                    # The first to fail ends the wait, wherever it stands.
                    first = concurrent.futures.FIRST_EXCEPTION
                    for future in concurrent.futures.wait(under_way, return_when=first).done:
                        future.result()
                    grown = [future.result() for future in under_way]
                except BaseException:
                    # The pool waits for its threads: let them end with the round they are in.
                    stopped.set()
                    raise
        trees: list[Tree] = [grown[i % ways][i // ways] for i in range(len(tasks))]
        for growth in growths:
            ledger.add(growth.ledger)
        return trees


class _Growth:
    """The state of one engine's part of a call of `Grower.grow`; tasks come with their seeds."""

    def __init__(
        self,
        grower: Grower,
        engine: Engine,
        tasks: Sequence[tuple[api.Task, int]],
        roots: int,
        rule: Branching,
        stopped: threading.Event,
    ):
        self.environment = grower.environment
        self.backend = grower.backend
        self.engine = engine
        self.dialogue = grower.dialogue
        self.limits = grower.limits
        self.max_turns = min(grower.limits.max_turns, grower.environment.max_turns)
        self.roots = roots
        self.rule = rule
        self.stopped = stopped
        self.ledger = Ledger()
        self.trees: list[Tree] = []
        self.queue = collections.deque(tasks)
        self.waiting: collections.deque[_Line] = collections.deque()
        self.live: list[_Line] = []

    def run(self) -> list[Tree]:
        while (self.queue or self.waiting or self.live) and not self.stopped.is_set():
            self._admit()
            if not self.live:
                continue  # no task that was let in could be started
            # Siblings join `live` as they are made; they have nothing to be decided or computed.
            present = list(self.live)
            entropies = read_all(self.engine, [line.handle for line in present])
            for line, entropy in zip(present, entropies, strict=True):
                if not line.planned:
                    self._plan(line, float(entropy))
            handles = [line.handle for line in self.live]
            turns = say_all(self.engine, handles, [self.limits.max_turn_tokens] * len(handles))
            # In order of creation, so that siblings are recorded in order.
            moved = list(zip(self.live, turns, strict=True))
            self.live = []
            for line, turn in moved:
                self._take_turn(line, turn)
        return self.trees

    # Slots.

    def _admit(self) -> None:
        """Gives free slots to waiting branches first, then to the roots of new tasks."""
        promised = 0
        while self.waiting and self.engine.free_slots:
            line = self.waiting.popleft()
            ids = np.concatenate(line.ids)
            line.handle = self.engine.open(ids, line.path.seed)
            self.ledger.prefilled += len(ids)
            self.live.append(line)
        while self.queue and self.engine.free_slots > promised:
            # A task whose roots do not all find a slot would have its prompt computed twice.
            if self.live and self.engine.free_slots - promised < self.roots:
                break
            task, seed = self.queue.popleft()
            root = self._start(task, seed)
            if root is not None:
                self.live.append(root)
                promised += self.roots - 1

    def _start(self, task: api.Task, seed: int) -> _Line | None:
        tree = Tree(task_id=task.id, root=Decision(planned=self.roots), info={"kind": task.kind})
        self.trees.append(tree)
        home = _Growing(task=task, tree=tree, budget=Budget(), open=1)
        line = _Line(
            home=home,
            decision=tree.root,
            path=Path(root=0, turn=0, since_fork=0, backbone=True, seed=_derive(seed, 0)),
            ids=[],
            history=[],
        )
        error = ""
        for _ in range(self.limits.retries + 1):
            try:
                line.sandbox, first = self._fresh(task)
                break
            except api.InfraError as failure:
                error = str(failure)
        else:
            tree.info["error"] = error
            return None
        ids = self.dialogue.prompt_ids(self.environment.prompt(task, first.observation))
        if len(ids) + self.limits.max_turn_tokens > self.limits.context:
            tree.info["error"] = (
                f"a prompt of {len(ids)} tokens leaves no room for a turn of "
                f"{self.limits.max_turn_tokens} in a context of {self.limits.context}"
            )
            logger.warning("task %s is left out: %s", task.id, tree.info["error"])
            _close(line.sandbox)
            return None
        tree.root.context_ids = ids
        tree.root.observation = first.observation
        tree.info["seed"] = seed
        line.ids.append(ids)
        line.handle = self.engine.open(ids, line.path.seed)
        self.ledger.prefilled += len(ids)
        return line

    # Deciding.

    def _plan(self, line: _Line, entropy: float) -> None:
        """Settles the number of children of a new decision and makes the branches for them."""
        decision, path, home = line.decision, line.path, line.home
        at_root = path.turn == 0
        decision.entropy = entropy
        decision.planned = children = (
            self.roots if at_root else self.rule.decide(path, entropy, home.budget)
        )
        line.planned = True
        if children == 1:
            return
        if not at_root:
            self.ledger.forks += 1
        sandboxes = self._fork_sandbox(line, children - 1)
        if not at_root:
            line.path = dataclasses.replace(path, since_fork=0)
        for index, sandbox in enumerate(sandboxes, start=1):
            if at_root:
                new = dataclasses.replace(
                    path, root=index, seed=_derive(home.tree.info["seed"], index)
                )
            else:
                seed = _derive(path.seed, path.turn, index)
                new = dataclasses.replace(path, since_fork=0, backbone=False, seed=seed)
            sibling = dataclasses.replace(
                line,
                path=new,
                ids=list(line.ids),
                history=list(line.history),
                handle=WAITING,
                sandbox=sandbox,
            )
            home.open += 1
            if self.engine.free_slots and not self.waiting:
                self.ledger.cache_saved += self.engine.length(line.handle)
                [sibling.handle] = self.engine.fork(line.handle, [new.seed])
                self.live.append(sibling)
            else:
                self.waiting.append(sibling)

    # Acting.

    def _take_turn(self, line: _Line, turn: Turn) -> None:
        self.ledger.decoded += len(turn.token_ids)
        text = self.dialogue.text(turn.token_ids)
        action = Action(
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            entropies=turn.entropies,
            text=text,
        )
        line.decision.actions.append(action)
        stopped = turn.finish == "stop"
        if not stopped:
            action.info["unfinished"] = True
        result = self._execute(line, action)
        if result is None:
            self._end(line, action, "masked")
            return
        path = line.path
        line.path = dataclasses.replace(path, turn=path.turn + 1, since_fork=path.since_fork + 1)
        if result.done:
            self._end(line, action, "done")
            return
        ids = self.dialogue.observation_ids(result.observation, stopped=stopped)
        total = self.engine.length(line.handle) + len(ids)
        if (
            result.truncated
            or line.path.turn >= self.max_turns
            or total + self.limits.max_turn_tokens > self.limits.context
        ):
            self._end(line, action, "truncated")
            return
        self.engine.extend(line.handle, ids)
        self.ledger.prefilled += len(ids)
        line.ids += [turn.token_ids, ids]
        line.decision = action.next = Decision(context_ids=ids, observation=result.observation)
        line.planned = False
        self.live.append(line)

    def _execute(self, line: _Line, action: Action) -> api.StepResult | None:
        """Parses and executes a turn; None when the sandbox is lost for good."""
        command = self.environment.parse(action.text)
        if isinstance(command, api.InvalidAction):
            action.info["invalid"] = True
            action.reward = -self.limits.invalid_penalty - command.penalty
            return api.StepResult(observation=command.reason)
        try:
            result = self._step(line, command)
        except api.InfraError as failure:
            action.info["error"] = str(failure)
            return None
        self.ledger.sandbox_steps += 1
        action.reward = float(result.reward)
        # The list of admissible commands is for demonstrators, and long.
        action.info |= {k: v for k, v in result.info.items() if k != "admissible"}
        if action.info.get("invalid"):
            action.reward -= self.limits.invalid_penalty
        return result

    def _end(self, line: _Line, action: Action, end: End) -> None:
        action.end = end
        self.ledger.returns += end != "masked"
        self.engine.free(line.handle)
        if line.sandbox is not None:
            _close(line.sandbox)
        home = line.home
        home.open -= 1
        if not home.open:
            for snapshot in home.snapshots:
                self.backend.release(snapshot)
            for decision in home.tree.decisions():
                decision.snapshot = None

    # Sandboxes.

    def _fresh(self, task: api.Task) -> tuple[api.Sandbox, api.StepResult]:
        sandbox = self.backend.start(task)
        first = sandbox.reset()
        if first.infra_error is not None:
            _close(sandbox)
            raise api.InfraError(first.infra_error)
        return sandbox, first

    def _fork_sandbox(self, line: _Line, k: int) -> Sequence[api.Sandbox | None]:
        """Siblings of the branch's sandbox; one that could not be made is rebuilt when it acts."""
        try:
            if line.sandbox is None:
                line.sandbox = self._rebuild(line, from_start=False)
            snapshot = line.sandbox.snapshot()
            self.ledger.snapshots += 1
            line.home.snapshots.append(snapshot)
            line.decision.snapshot = snapshot
            line.anchor = (snapshot, len(line.history))
            return self.backend.fork(snapshot, k)
        except api.InfraError:
            return [None] * k

    def _step(self, line: _Line, command: str) -> api.StepResult:
        """Executes a command; a broken sandbox is rebuilt and its recorded actions replayed.

        The command itself is never sampled again: that would favour actions that do not break.
        """
        error = ""
        for attempt in range(self.limits.retries + 1):
            try:
                if line.sandbox is None:
                    # The last attempt does not trust the snapshot either.
                    last = attempt > 0 and attempt == self.limits.retries
                    line.sandbox = self._rebuild(line, from_start=last)
                result = line.sandbox.step(command)
                if result.infra_error is None:
                    line.history.append((command, result.observation))
                    return result
                error = result.infra_error
            except api.InfraError as failure:
                error = str(failure)
            if line.sandbox is not None:
                _close(line.sandbox)
                line.sandbox = None
        raise api.InfraError(error)

    def _rebuild(self, line: _Line, *, from_start: bool) -> api.Sandbox:
        if line.anchor is None or from_start:
            sandbox, _ = self._fresh(line.home.task)
            done = 0
        else:
            snapshot, done = line.anchor
            [sandbox] = self.backend.fork(snapshot, 1)
        for command, observed in line.history[done:]:
            result = sandbox.step(command)
            self.ledger.replayed_steps += 1
            if result.infra_error is not None or result.observation != observed:
                _close(sandbox)
                raise api.InfraError(
                    result.infra_error
                    or f"replaying {command!r} gave {result.observation!r}, not {observed!r}"
                )
        return sandbox


def _close(sandbox: api.Sandbox) -> None:
    # A sandbox that is given up may be unable to close; nothing depends on it any more.
    with contextlib.suppress(api.InfraError):
        sandbox.close()


def _derive(seed: int, *path: Any) -> int:
    """A 64-bit seed named by `path` below `seed`."""
    name = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _task_seeds(tasks: Sequence[api.Task], seed: int) -> list[int]:
    """A seed per task, named by its id and by how often the id came before."""
    seen: collections.Counter[str] = collections.Counter()
    seeds = []
    for task in tasks:
        seeds.append(_derive(seed, task.id, seen[task.id]))
        seen[task.id] += 1
    return seeds
