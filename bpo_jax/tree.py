"""The tree of one task: decisions (nodes), actions (edges), and nothing that knows how they arose.

A *decision* is a state in which the policy is about to sample: everything the policy has read so
far. An *action* is one sampled turn: it leaves a decision and leads to the next one, or to the end.
A decision may also lie in the middle of a turn, whose parts are then actions of their own.
A *tree* holds the M root trajectories of one task and the siblings forked along them. All roots
start in the same state, so they are the children of one root decision; a flat group of N
trajectories (GRPO, RLOO) is a tree whose only decision with several actions is the root. A *fork*
is a decision below the root with several actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

End = Literal["done", "truncated", "masked"]
"""How a trajectory ended: by the task's own rule, by a limit that belongs to the task (turns,
tokens, seconds; its return counts), or by an infrastructure failure (its return does not exist)."""


def _empty_ids() -> np.ndarray:
    return np.zeros(0, np.int32)


def _empty_floats() -> np.ndarray:
    return np.zeros(0, np.float32)


@dataclasses.dataclass(kw_only=True, eq=False)
class Action:
    """One sampled turn or a part of one, an edge of the tree.

    Attributes:
      token_ids: int32 [n], exactly the ids that were sampled, the stop token included.
      logprobs: float32 [n], log-probability of each under the distribution it was sampled from.
      entropies: float32 [n], entropy in nats of that distribution.
      text: the decoded turn, for people; nothing is ever tokenised again from it.
      reward: what the environment paid for this action.
      next: the decision it leads to; None while the branch is open and at the end of a trajectory.
      end: how the trajectory ended with this action, None where it goes on.
      info: plain facts from the environment (``won``, ``invalid``, ``error``, ...).
    """

    token_ids: np.ndarray = dataclasses.field(default_factory=_empty_ids)
    logprobs: np.ndarray = dataclasses.field(default_factory=_empty_floats)
    entropies: np.ndarray = dataclasses.field(default_factory=_empty_floats)
    text: str = ""
    reward: float = 0.0
    next: Decision | None = None
    end: End | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True, eq=False)
class Decision:
    """A state just before the policy samples, a node of the tree.

    Attributes:
      context_ids: int32 [n], the tokens the policy reads here that it did not write: the prompt at
        the root, below it what follows the parent's action (turn markers and the observation).
      fresh: ``context_ids`` is the whole of what the policy reads here and continues nothing, as
        with agents whose prompt is built anew every turn (a window of the last turns). The root is
        read so in any case. In one tree some decisions may be fresh and others not.
      entropy: nats, of the distribution of the first token to be sampled; None where not measured.
      measure: what the branching rule judged the decision by, where that is not `entropy`: the
        entropy of probes in nats, or the spread of the returns that were tried out.
      inclusion: the probability, given the finished trajectory, with which a post-hoc placement
        was to fork it; None where forks were not drawn so.
      mid_turn: the action before it is an unfinished turn. Valid where the tokens so far decide it
        (the first marker of a turn, never the last); all later tokens are sampled anew.
      planned: K, the number of children decided and charged before the first of them was sampled.
      actions: the children, in the order they were sampled. At a fork the first one is the
        backbone's own, the others are fresh.
      observation: the text behind ``context_ids``, for people.
      snapshot: the sandbox state to fork from, while the tree grows; None afterwards.
    """

    context_ids: np.ndarray = dataclasses.field(default_factory=_empty_ids)
    fresh: bool = False
    entropy: float | None = None
    measure: float | None = None
    inclusion: float | None = None
    mid_turn: bool = False
    planned: int = 1
    actions: list[Action] = dataclasses.field(default_factory=list)
    observation: str = ""
    snapshot: Any = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Tree:
    """All trajectories grown for one task.

    Every function that returns one number per action (advantages, coefficients, packed action ids)
    uses the order of `actions()`.
    """

    task_id: str
    root: Decision
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def decisions(self) -> list[Decision]:
        """Decisions that have children, in preorder (a parent before its children)."""
        found = []
        stack = [self.root]
        while stack:
            decision = stack.pop()
            if decision.actions:
                found.append(decision)
            stack.extend(a.next for a in reversed(decision.actions) if a.next is not None)
        return found

    def actions(self) -> list[Action]:
        """Actions in preorder: an action before all that lies below it."""
        found = []
        stack = list(reversed(self.root.actions))
        while stack:
            action = stack.pop()
            found.append(action)
            if action.next is not None:
                stack.extend(reversed(action.next.actions))
        return found

    def leaves(self) -> list[Action]:
        """The last action of every trajectory, masked ones included, in preorder."""
        return [a for a in self.actions() if a.end is not None]

    def forks(self) -> list[Decision]:
        """Decisions below the root with more than one action."""
        return [d for d in self.decisions() if len(d.actions) > 1 and d is not self.root]

    def paths(self) -> Iterator[list[Action]]:
        """Every trajectory as its list of actions, root to leaf, in preorder of the leaves."""
        stack = [[a] for a in reversed(self.root.actions)]
        while stack:
            path = stack.pop()
            last = path[-1]
            if last.end is not None:
                yield path
            if last.next is not None:
                stack.extend(path + [a] for a in reversed(last.next.actions))
