"""What the grower knows of a branch under way, of its tree, and of what is tried out for it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpo_jax.rollout.api import Branch
from bpo_jax.rollout.branching import Budget, Path
from bpo_jax.sandbox import api
from bpo_jax.sandbox.recoverable import RecoverableSandbox
from bpo_jax.tree import Action, Decision, Tree

WAITING: Branch = -1
"""The engine branch of a line that has no slot yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a trajectory may use. All but the last two are the task's: reaching one is an outcome.

    Attributes:
      max_turns: turns of a trajectory; the environment's own limit holds as well.
      max_turn_tokens: tokens of a turn.
      context: tokens of a trajectory, what was read and what was sampled. A trajectory that has no
        room for a full turn left ends as truncated.
      invalid_penalty: subtracted from the reward of a turn in which no action can be read, or whose
        action the sandbox refuses (``info["invalid"]``); what the environment itself charges for
        the first comes on top.
      max_invalid: turns in a row without a valid action that end a trajectory as truncated; None:
        any number.
      max_seconds: of a trajectory's turns, sampling and sandbox together; the turn that passes it
        is the last. None: no limit.
      retries: how often a broken sandbox is rebuilt for one action before the leaf is masked.
      step_seconds: a sandbox that takes longer for one call counts as broken; None: no limit.
    """

    max_turns: int
    max_turn_tokens: int
    context: int
    invalid_penalty: float = 0.0
    max_invalid: int | None = None
    max_seconds: float | None = None
    retries: int = 2
    step_seconds: float | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Growing:
    """A tree under way.

    Attributes:
      task: what it is grown for.
      seed: of its sampling.
      budget: forks made so far.
      snapshots: of its sandboxes; released when the last branch has ended.
      promised: slots kept free for roots that are still to be made.
      open: branches that have not ended, those that are tried out included.
    """

    task: api.Task
    seed: int
    tree: Tree
    budget: Budget = dataclasses.field(default_factory=Budget)
    snapshots: list[api.Snapshot] = dataclasses.field(default_factory=list)
    promised: int = 0
    open: int = 1


@dataclasses.dataclass(kw_only=True, eq=False)
class Trial:
    """Continuations of a decision that are tried out, and thrown away, to judge it.

    Attributes:
      line: stands at the decision and waits.
      left: how many have not ended.
      texts: what probes said.
      returns: what rollouts earned.
    """

    line: Line
    left: int
    texts: list[str] = dataclasses.field(default_factory=list)
    returns: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, eq=False)
class Line:
    """A branch under way: reading, saying, acting, or waiting for one of these.

    Attributes:
      home: its tree.
      decision: where it stands.
      action: what it says there, one of ``decision.actions``; filled in when it has been said.
      path: how it came here.
      ids: every token of the branch, from which a waiting branch is opened.
      sandbox: None for a probe, which never acts.
      handle: the engine's branch, `WAITING` while there is no slot for it.
      said: the parts of the turn so far, where a marker has divided it.
      invalid: turns in a row without a valid action.
      began: when its turn began, by the grower's clock.
      seconds: that its earlier turns took.
      stops: for a post-hoc placement, copies of the branch as it stood at the decisions it came
        through, whose sandboxes can be made from snapshots.
      trial: what it is tried out for; None for a branch of the tree.
      earned: by a rollout that is tried out.
    """

    home: Growing
    decision: Decision
    action: Action
    path: Path
    ids: list[np.ndarray]
    sandbox: RecoverableSandbox | None
    handle: Branch = WAITING
    said: list[np.ndarray] = dataclasses.field(default_factory=list)
    invalid: int = 0
    began: float = 0.0
    seconds: float = 0.0
    stops: list[Line] = dataclasses.field(default_factory=list)
    trial: Trial | None = None
    earned: float = 0.0

    def beside(self, **changes: Any) -> Line:
        """Another branch that has come the same way and has no slot yet."""
        # Lists grow, each for its own branch.
        changes = {"ids": list(self.ids), "said": list(self.said), "stops": []} | changes
        return dataclasses.replace(self, handle=WAITING, **changes)


def derive(seed: int, *path: Any) -> int:
    """A 64-bit seed named by `path` below `seed`."""
    name = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def roots_beside(line: Line, roots: int) -> list[Line]:
    """Branches for the other roots of a tree, beside the first one at its first decision."""
    siblings = _children_beside(line, roots)
    for index, sibling in enumerate(siblings, start=1):
        sibling.path = dataclasses.replace(
            line.path, root=index, seed=derive(line.home.seed, index)
        )
    return siblings


def siblings_of(line: Line, children: int) -> list[Line]:
    """Branches for the other children of a fork; `line` itself goes on as the first."""
    path = line.path
    line.path = dataclasses.replace(path, since_fork=0, tokens_since_fork=0)
    siblings = _children_beside(line, children)
    for index, sibling in enumerate(siblings, start=1):
        seed = derive(path.seed, path.turn, index)
        sibling.path = dataclasses.replace(line.path, backbone=False, seed=seed)
    return siblings


def _children_beside(line: Line, children: int) -> list[Line]:
    decision = line.decision
    decision.planned = children
    decision.actions += [Action() for _ in range(children - len(decision.actions))]
    line.home.open += children - 1
    assert line.sandbox is not None
    return [
        line.beside(action=action, sandbox=line.sandbox.sibling())
        for action in decision.actions[1:]
    ]


def trials_of(line: Line, count: int, *, acting: bool) -> list[Line]:
    """Branches that try out what comes after the decision at which `line` waits.

    Args:
      line: of the tree.
      count: of branches.
      acting: they go on to the end of the task; otherwise they only speak once.
    """
    trial = Trial(line=line, left=count)
    line.home.open += count
    trials = []
    for index in range(count):
        action = Action()
        seed = derive(line.path.seed, line.path.turn, "trial", index)
        trials.append(
            line.beside(
                action=action,
                decision=Decision(mid_turn=line.decision.mid_turn, actions=[action]),
                path=dataclasses.replace(line.path, backbone=False, seed=seed),
                sandbox=line.sandbox.sibling() if acting and line.sandbox is not None else None,
                trial=trial,
                earned=0.0,
            )
        )
    return trials


def entropy_of(texts: Sequence[str]) -> float:
    """Nats, of the distribution in which each of `texts` is as frequent as here."""
    _, counts = np.unique(list(texts), return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())
