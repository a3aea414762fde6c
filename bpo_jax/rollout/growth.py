"""The loop that grows trees on one engine.

Every branch is a `Line`. The engine is asked what lines want to read and say, the workers do what
their sandboxes have to do, and whatever is ready is taken up, by the methods of `Growth` in the
order of a line's life: started, read, decided and forked, said, acted, observed, ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bpo_jax.ledger import Ledger
from bpo_jax.rollout import lines as lines_lib
from bpo_jax.rollout.api import Branch, Engine, Turn
from bpo_jax.rollout.branching import Branching, Path
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.rollout.lines import Growing, Limits, Line, Trial
from bpo_jax.sandbox import api
from bpo_jax.sandbox.recoverable import RecoverableSandbox, within
from bpo_jax.sandbox.workers import Finished, Workers
from bpo_jax.tree import Action, Decision, End, Tree

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that sandboxes in the middle of a call have to finish it when growing is broken off."""
PULSE = 0.1
"""Seconds between two looks at whether to stop, while all wait for sandboxes."""


@dataclasses.dataclass(kw_only=True)
class Waits:
    """Seconds lost to waiting, on either side.

    Attributes:
      sandboxes: in which an engine had nothing to do, because sandboxes were at work.
      device: that finished sandbox work lay until it was taken up, because an engine was in a step
        or, where growing is deterministic, another sandbox was slower; added over branches.
    """

    sandboxes: float = 0.0
    device: float = 0.0


class Growth:
    """One engine's part of a call of `Grower.grow`.

    Args:
      tasks: each with the seed of its tree.
      stopped: set by others to make `run` end with what it is doing.
      The other arguments are those of `Grower` and of `Grower.grow`.

    Attributes:
      trees: in the order of `tasks`, complete when `run` has returned.
      ledger: what was spent on them.
      waits: seconds lost.
    """

    def __init__(
        self,
        *,
        environment: api.Environment,
        backend: api.Backend,
        engine: Engine,
        dialogue: Dialogue,
        limits: Limits,
        threads: int,
        deterministic: bool,
        clock: Callable[[], float],
        tasks: Sequence[tuple[api.Task, int]],
        roots: int,
        rule: Branching,
        stopped: threading.Event,
    ):
        self.environment = environment
        self.backend = backend
        self.engine = engine
        self.dialogue = dialogue
        self.limits = limits
        self.max_turns = min(limits.max_turns, environment.max_turns)
        self.deterministic = deterministic
        self.clock = clock
        self.roots = roots
        self.rule = rule
        self.stopped = stopped
        self.ledger = Ledger()
        self.waits = Waits()
        self.trees: list[Tree] = []
        self.queue = collections.deque(tasks)
        self.waiting: collections.deque[Line] = collections.deque()
        self.trials: collections.deque[Line] = collections.deque()
        self.lines: dict[Branch, Line] = {}
        self.asked: set[Branch] = set()
        self.promised = 0
        self.homes: set[Growing] = set()
        self.sandboxes: set[RecoverableSandbox] = set()
        self.workers = Workers(threads)
        # Kept for what is tried out: branches that wait for its end hold all other slots.
        self.reserve = int(rule.config.placement != "none" and rule.config.measure != "first_token")
        if engine.free_slots <= self.reserve:
            raise ValueError(
                f"rollout.slots leaves {engine.free_slots} free on this device: expected at least "
                f"{self.reserve + 1} for this kind of branching"
            )

    def run(self) -> None:
        """Grows `trees` until every branch has ended, or until told to stop."""
        try:
            self.workers.begin()
            while not self.stopped.is_set():
                self._admit()
                self._take_up_finished()
                if self.asked:
                    for answer in self.engine.step():
                        self.asked.remove(answer.branch)
                        line = self.lines[answer.branch]
                        if answer.turn is not None:
                            self._said(line, answer.turn)
                        elif answer.entropy is not None:
                            self._read(line, answer.entropy)
                elif self.workers.outstanding:
                    self._wait_for_sandboxes()
                elif not (self.queue or self.waiting or self.trials):
                    break
        except BaseException:
            self._break_off()
            raise
        if self.stopped.is_set():
            self._break_off()
        self.workers.close(PATIENCE)

    # What sandboxes have done.

    def _take_up_finished(self) -> None:
        if self.deterministic:
            while self.workers.outstanding and not self.stopped.is_set():
                batch: list[Finished] = []
                while self.workers.outstanding and not self.stopped.is_set():
                    finished = self._collect(PULSE)
                    if finished is not None:
                        batch.append(finished)
                for finished in sorted(batch, key=lambda f: f.number):
                    self._take_up(finished)
        else:
            while (finished := self.workers.collect()) is not None:
                self._take_up(finished)

    def _wait_for_sandboxes(self) -> None:
        finished = self._collect(PULSE)
        if finished is not None:
            self._take_up(finished)

    def _collect(self, seconds: float) -> Finished | None:
        finished = self.workers.collect()
        if finished is None:
            began = time.monotonic()
            finished = self.workers.collect(seconds)
            self.waits.sandboxes += time.monotonic() - began
        return finished

    def _take_up(self, finished: Finished) -> None:
        if finished.error is not None:
            raise finished.error
        self.waits.device += max(0.0, time.monotonic() - finished.at)
        finished.then(finished.value)

    # Slots.

    def _free_slots(self) -> int:
        return self.engine.free_slots - self.promised - self.reserve

    def _admit(self) -> None:
        """Gives free slots to what is tried out, to waiting branches, to the roots of new tasks."""
        while self.trials and self.engine.free_slots > self.promised:
            self._open(self.trials.popleft())
        while self.waiting and self._free_slots() > 0:
            self._open(self.waiting.popleft())
        while self.queue and self._free_slots() > 0:
            # A task whose roots do not all find a slot would have its prompt computed twice.
            if self.homes and self._free_slots() < self.roots:
                break
            self._start(*self.queue.popleft())

    def _open(self, line: Line) -> None:
        """Gives a slot to a branch that waits to say something."""
        if line.trial is not None:
            [line.handle] = self.engine.fork(line.trial.line.handle, [line.path.seed])
        else:
            ids = np.concatenate(line.ids + line.said)
            line.handle = self.engine.open(ids, line.path.seed)
            self.ledger.prefilled += len(ids)
        self.lines[line.handle] = line
        line.began = self.clock()
        self._say(line)

    def _start(self, task: api.Task, seed: int) -> None:
        tree = Tree(task_id=task.id, root=Decision(planned=self.roots), info={"kind": task.kind})
        self.trees.append(tree)
        home = Growing(task=task, seed=seed, tree=tree, promised=self.roots)
        self.homes.add(home)
        self.promised += home.promised
        sandbox = RecoverableSandbox(
            self.backend,
            task,
            snapshots=home.snapshots,
            retries=self.limits.retries,
            seconds=self.limits.step_seconds,
        )
        self.sandboxes.add(sandbox)
        self.workers.submit(
            [sandbox], sandbox.start, lambda first: self._started(home, sandbox, first)
        )

    def _started(
        self, home: Growing, sandbox: RecoverableSandbox, first: api.StepResult | api.InfraError
    ) -> None:
        tree, task = home.tree, home.task
        ids = np.zeros(0, np.int32)
        if isinstance(first, api.InfraError):
            tree.info["error"] = str(first)
        else:
            ids = self.dialogue.prompt_ids(self.environment.prompt(task, first.observation))
            if len(ids) + self.limits.max_turn_tokens > self.limits.context:
                tree.info["error"] = (
                    f"a prompt of {len(ids)} tokens leaves no room for a turn of "
                    f"{self.limits.max_turn_tokens} in a context of {self.limits.context}"
                )
        if "error" in tree.info:
            logger.warning("task %s is left out: %s", task.id, tree.info["error"])
            self._keep_promise(home, home.promised)
            self._close(sandbox)
            self._leave(home)
            return
        assert isinstance(first, api.StepResult)
        tree.root.context_ids = ids
        tree.root.observation = first.observation
        tree.root.actions = [Action()]
        tree.info["seed"] = home.seed
        line = Line(
            home=home,
            decision=tree.root,
            action=tree.root.actions[0],
            path=Path(
                root=0,
                turn=0,
                since_fork=0,
                tokens_since_fork=0,
                backbone=True,
                seed=lines_lib.derive(home.seed, 0),
            ),
            ids=[ids],
            sandbox=sandbox,
        )
        self._keep_promise(home, 1)
        line.handle = self.engine.open(ids, line.path.seed)
        self.lines[line.handle] = line
        self.ledger.prefilled += len(ids)
        self._ask_to_read(line)

    def _keep_promise(self, home: Growing, slots: int) -> None:
        """Slots kept for a tree's roots are theirs to take now."""
        self.promised -= slots
        home.promised -= slots

    # Asking.

    def _ask_to_read(self, line: Line) -> None:
        line.began = self.clock()
        self.engine.read(line.handle)
        self.asked.add(line.handle)

    def _count_seconds(self, line: Line) -> None:
        """Adds to a branch the time since it was last counted; waiting for a slot is none."""
        now = self.clock()
        line.seconds += now - line.began
        line.began = now

    def _say(self, line: Line) -> None:
        c = self.rule.config
        left = self.limits.max_turn_tokens - sum(len(part) for part in line.said)
        if line.trial is not None and line.sandbox is None:
            left = min(left, c.probe_tokens)
        elif c.boundary == "marker" and line.trial is None and not line.said:
            self.engine.say(line.handle, left, c.markers or ())
            self.asked.add(line.handle)
            return
        self.engine.say(line.handle, left)
        self.asked.add(line.handle)

    # Deciding.

    def _read(self, line: Line, entropy: float) -> None:
        """Settles how many children the decision has that a branch has come to."""
        line.decision.entropy = entropy
        self._count_seconds(line)
        rule, path = self.rule, line.path
        candidate = line.decision.mid_turn == (rule.config.boundary == "marker")
        if path.turn == 0 and not line.decision.mid_turn:
            self._make_roots(line)
        elif not candidate:
            self._say(line)
        elif rule.config.post_hoc:
            self._remember(line)
            self._say(line)
        elif rule.config.measure != "first_token":
            if rule.allows(path, line.home.budget):
                self._try_out(line)
            else:
                self._say(line)
        else:
            self._decide(line, entropy)

    def _decide(self, line: Line, measure: float) -> None:
        children = self.rule.decide(line.path, measure, line.home.budget)
        if children > 1:
            self._fork(line, children)
        self._say(line)

    def _make_roots(self, line: Line) -> None:
        self._keep_promise(line.home, line.home.promised)
        self._grow_beside(line, lines_lib.roots_beside(line, self.roots))
        self._say(line)

    def _fork(self, line: Line, children: int) -> None:
        """Makes the branches of a fork that has been decided and paid for."""
        self.ledger.forks += 1
        self._grow_beside(line, lines_lib.siblings_of(line, children))

    def _grow_beside(self, line: Line, siblings: Sequence[Line]) -> None:
        """Forks engine branch and sandbox; where there is no slot a branch waits for one."""
        self._fork_sandbox(line, siblings)
        for sibling in siblings:
            if self._free_slots() > 0 and not self.waiting:
                self.ledger.cache_saved += self.engine.length(line.handle)
                [sibling.handle] = self.engine.fork(line.handle, [sibling.path.seed])
                self.lines[sibling.handle] = sibling
                self._say(sibling)
            else:
                self.waiting.append(sibling)

    def _fork_sandbox(self, line: Line, others: Sequence[Line], *, live: bool = True) -> None:
        sandbox = line.sandbox
        theirs = [other.sandbox for other in others if other.sandbox is not None]
        if sandbox is None or not theirs:
            return
        self.sandboxes.update(theirs)
        line.home.open += 1  # its snapshots are needed until this is done

        def forked(snapshots: int) -> None:
            self.ledger.snapshots += snapshots
            self._count_replays(sandbox)
            self._leave(line.home)

        self.workers.submit([sandbox, *theirs], lambda: sandbox.fork(theirs, live=live), forked)

    # Judging a decision by what is tried out from it.

    def _try_out(self, line: Line) -> None:
        c = self.rule.config
        probing = c.measure == "probe"
        trials = lines_lib.trials_of(
            line, c.probes if probing else c.oracle_rollouts, acting=not probing
        )
        self._fork_sandbox(line, trials)
        self.trials += trials

    def _tried(self, trial: Trial) -> None:
        """One of the continuations has ended; with the last the decision is judged."""
        trial.left -= 1
        if trial.left:
            return
        if self.rule.config.measure == "probe":
            measure = lines_lib.entropy_of(trial.texts)
        else:
            measure = float(np.std(trial.returns, ddof=1)) if len(trial.returns) > 1 else 0.0
        trial.line.decision.measure = measure
        trial.line.began = self.clock()
        self._decide(trial.line, measure)

    # Choosing forks of a trajectory that has ended.

    def _remember(self, line: Line) -> None:
        """Keeps what it takes to fork this decision later."""
        if not line.path.backbone:
            return
        assert line.sandbox is not None
        stop = line.beside(sandbox=line.sandbox.sibling())
        line.stops.append(stop)
        self._fork_sandbox(line, [stop], live=False)

    def _fork_stops(self, line: Line, *, lost: bool) -> None:
        """Forks the decisions of a trajectory that has ended; a lost one has no return to go by."""
        stops, line.stops = line.stops, []
        if stops and not lost:
            candidates = [(stop.path, float(stop.decision.entropy or 0.0)) for stop in stops]
            choice = self.rule.choose(candidates, line.home.budget)
            if choice.inclusion is not None:
                for stop, probability in zip(stops, choice.inclusion, strict=True):
                    stop.decision.inclusion = probability
            for index in choice.forks:
                self.ledger.forks += 1
                siblings = lines_lib.siblings_of(stops[index], self.rule.config.siblings)
                self.sandboxes.update(s.sandbox for s in siblings if s.sandbox is not None)
                self.waiting += siblings
        for stop in stops:
            if stop.sandbox is not None:
                self._close(stop.sandbox)

    # Acting.

    def _said(self, line: Line, turn: Turn) -> None:
        """Records what a branch has said, and executes it where the turn is complete."""
        count = len(turn.token_ids)
        if line.trial is None:
            self.ledger.decoded += count
        else:
            self.ledger.probed += count
        action = line.action
        action.token_ids, action.logprobs = turn.token_ids, turn.logprobs
        action.entropies = turn.entropies
        action.text = self.dialogue.text(turn.token_ids)
        line.said.append(turn.token_ids)
        spoken = np.concatenate(line.said)
        if line.trial is not None and line.sandbox is None:
            command = self.environment.parse(self.dialogue.text(spoken))
            text = command if isinstance(command, str) else self.dialogue.text(spoken)
            line.trial.texts.append(" ".join(text.split()))
            self._end(line, "truncated")
            return
        if turn.finish == "marker" and len(spoken) < self.limits.max_turn_tokens:
            line.action = Action()
            line.decision = action.next = Decision(mid_turn=True, actions=[line.action])
            line.path = dataclasses.replace(
                line.path, tokens_since_fork=line.path.tokens_since_fork + count
            )
            self.engine.read(line.handle)
            self.asked.add(line.handle)
            return
        if turn.finish != "stop":
            action.info["unfinished"] = True
        self._act(line, spoken, count)

    def _act(self, line: Line, spoken: np.ndarray, count: int) -> None:
        command = self.environment.parse(self.dialogue.text(spoken))
        path, action, sandbox = line.path, line.action, line.sandbox
        line.path = dataclasses.replace(
            path,
            turn=path.turn + 1,
            since_fork=path.since_fork + 1,
            tokens_since_fork=path.tokens_since_fork + count,
        )
        line.ids.append(spoken)
        line.said = []
        if isinstance(command, api.InvalidAction):
            action.info["invalid"] = True
            action.reward = -self.limits.invalid_penalty - command.penalty
            self._observe(line, api.StepResult(observation=command.reason))
            return
        assert sandbox is not None
        self.workers.submit(
            [sandbox], lambda: sandbox.step(command), lambda result: self._acted(line, result)
        )

    def _acted(self, line: Line, result: api.StepResult | api.InfraError) -> None:
        action, sandbox = line.action, line.sandbox
        assert sandbox is not None
        self._count_replays(sandbox)
        if isinstance(result, api.InfraError):
            action.info["error"] = str(result)
            self._end(line, "masked")
            return
        self.ledger.sandbox_steps += 1
        action.reward = float(result.reward)
        # The list of admissible commands is for demonstrators, and long.
        action.info |= {k: v for k, v in result.info.items() if k != "admissible"}
        if action.info.get("invalid"):
            action.reward -= self.limits.invalid_penalty
        self._observe(line, result)

    def _count_replays(self, sandbox: RecoverableSandbox) -> None:
        self.ledger.replayed_steps += sandbox.replayed
        sandbox.replayed = 0

    def _observe(self, line: Line, result: api.StepResult) -> None:
        """Shows a branch what its turn led to, or ends it."""
        action, limits = line.action, self.limits
        line.invalid = line.invalid + 1 if action.info.get("invalid") else 0
        self._count_seconds(line)
        line.earned += action.reward
        if result.done:
            self._end(line, "done")
            return
        stopped = not action.info.get("unfinished")
        room = limits.context - limits.max_turn_tokens - self.engine.length(line.handle)
        ids = self.dialogue.observation_ids(result.observation, stopped=stopped, room=room)
        if (
            result.truncated
            or line.path.turn >= self.max_turns
            or len(ids) > room
            or (limits.max_invalid is not None and line.invalid >= limits.max_invalid)
            or (limits.max_seconds is not None and line.seconds >= limits.max_seconds)
        ):
            self._end(line, "truncated")
            return
        self.engine.extend(line.handle, ids)
        self.ledger.prefilled += len(ids)
        line.ids.append(ids)
        line.action = Action()
        line.decision = action.next = Decision(
            context_ids=ids,
            observation=self.dialogue.shown(result.observation, stopped=stopped, room=room),
            actions=[line.action],
        )
        line.path = dataclasses.replace(
            line.path, tokens_since_fork=line.path.tokens_since_fork + len(ids)
        )
        if line.trial is None:
            self._ask_to_read(line)
        else:
            self._say(line)

    # Ending.

    def _end(self, line: Line, end: End) -> None:
        self.engine.free(line.handle)
        del self.lines[line.handle]
        if line.sandbox is not None:
            self._close(line.sandbox)
        trial = line.trial
        if trial is None:
            line.action.end = end
            self.ledger.returns += end != "masked"
            self._fork_stops(line, lost=end == "masked")
        elif line.sandbox is not None and end != "masked":
            trial.returns.append(line.earned)
        self._leave(line.home)
        if trial is not None:
            self._tried(trial)

    def _leave(self, home: Growing) -> None:
        """A branch of the tree has ended; with the last, nothing can be forked any more."""
        home.open -= 1
        if home.open:
            return
        self.workers.submit([home], lambda: self._release(home), lambda _: self.homes.discard(home))

    def _close(self, sandbox: RecoverableSandbox) -> None:
        def closed(_: None) -> None:
            self.sandboxes.discard(sandbox)

        self.workers.submit([sandbox], sandbox.close, closed)

    def _release(self, home: Growing) -> None:
        while home.snapshots:
            snapshot = home.snapshots.pop()
            # What cannot be released is lost to nobody but the disk; growing goes on.
            with contextlib.suppress(api.InfraError):
                within(
                    self.limits.step_seconds,
                    functools.partial(self.backend.release, snapshot),
                )

    def _break_off(self) -> None:
        """Leaves nothing behind: neither engine branch, sandbox nor snapshot.

        Something has failed, and more may fail here; what did first is what is reported.
        """
        for handle in self.lines:
            with _logged("freeing an engine branch"):
                self.engine.free(handle)
        self.workers.close(PATIENCE)
        for sandbox in self.sandboxes:
            with _logged("closing a sandbox"):
                sandbox.close()
        for home in self.homes:
            while home.snapshots:
                with _logged("releasing a snapshot"):
                    self._release(home)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s failed", what)
