"""Values of a tree from the bottom up, and flow weights from the top down.

Rewards sit on edges. With K the number of children of a decision that have a return below them:

    V(end) = 0,   Q(a) = r(a) + gamma V(next(a)),   V(v) = mean of Q over the K children of v
    w(root) = 1,  w(a) = w(v) / K

Gamma counts turns: where v is a mid-turn decision, V(v) is not discounted above.

An action none of whose leaves has a return (all masked) is *invalid*: it is left out of every mean,
and the flow goes to its siblings. K is drawn before the children are, so w(a) is the probability of
reaching a by going down the tree at random, and V estimates the policy's value without bias.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from bpo_jax import tree as tree_lib

ROOT = -1
"""Parent of the actions taken at the root decision."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Values:
    """A solved tree; every array is aligned with ``tree.actions()``.

    Attributes:
      gamma: discount per turn.
      parent: int64 [A], index of the action before this one; `ROOT` for the roots.
      depth: int64 [A], number of turns finished before this action.
      leaf: bool [A], whether a trajectory ends here.
      valid: bool [A], whether a return lies below.
      siblings: int64 [A], valid actions at the same decision, this one included.
      reward: float64 [A].
      q: float64 [A], return-to-go averaged over the flow below; 0 where invalid.
      earlier: float64 [A], discounted rewards from the start up to the action, its own excluded.
      weight: float64 [A], flow weight; 0 where invalid. Those of the leaves add up to 1.
      root_value: mean of q over the valid roots; nan when there is none.
    """

    gamma: float
    parent: np.ndarray
    depth: np.ndarray
    leaf: np.ndarray
    valid: np.ndarray
    siblings: np.ndarray
    reward: np.ndarray
    q: np.ndarray
    earlier: np.ndarray
    weight: np.ndarray
    root_value: float

    @property
    def decision(self) -> np.ndarray:
        """int64 [A], index in ``tree.decisions()`` of the decision an action was taken at."""
        # In preorder, decisions come in the order of the actions that lead to them.
        return np.unique(self.parent, return_inverse=True)[1]

    @property
    def first(self) -> np.ndarray:
        """bool [A], whether it is its decision's first action; masked ones count."""
        place = np.arange(len(self.parent))
        _, opens = np.unique(self.parent, return_index=True)
        return np.isin(place, opens)

    @property
    def backbone(self) -> np.ndarray:
        """bool [A], whether it is a root or goes on from one by first actions alone."""
        first, backbone = self.first, self.parent == ROOT
        for i in np.flatnonzero(first & ~backbone):
            backbone[i] = backbone[self.parent[i]]
        return backbone

    @property
    def discount(self) -> np.ndarray:
        """float64 [A], gamma to the power of the depth."""
        return self.gamma**self.depth

    @property
    def total(self) -> np.ndarray:
        """float64 [A], the return from the start: earlier + gamma^depth q; 0 where invalid.

        For a leaf it is the trajectory's return, above it the flow-weighted mean of the leaves'.
        """
        return np.where(self.valid, self.earlier + self.discount * self.q, 0.0)


def solve(tree: tree_lib.Tree, gamma: float = 1.0) -> Values:
    """Values and flow weights of a finished tree.

    Args:
      tree: every trajectory in it has ended.
      gamma: discount per turn, in (0, 1].

    Raises:
      ValueError: gamma out of range, a tree without actions, a trajectory that has not ended, or a
        reward that is not a number.
    """
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}, expected a number in (0, 1]")
    actions, parent = _preorder(tree)
    count = len(actions)
    reward = [float(a.reward) for a in actions]
    depth = [0] * count
    turns = [0 if a.next is not None and a.next.mid_turn else 1 for a in actions]
    # Entry i + 1 belongs to the decision after action i, entry 0 to the root decision.
    children = [0] * (count + 1)
    child_sum = [0.0] * (count + 1)
    valid = [False] * count
    q = [0.0] * count
    for i in range(count - 1, -1, -1):
        action = actions[i]
        if not math.isfinite(reward[i]):
            raise ValueError(f"action {i} of tree {tree.task_id!r} has reward {reward[i]}")
        if action.next is None:
            valid[i] = action.end != "masked"
            q[i] = reward[i]
        elif children[i + 1]:
            valid[i] = True
            q[i] = reward[i] + gamma ** turns[i] * child_sum[i + 1] / children[i + 1]
        if valid[i]:
            children[parent[i] + 1] += 1
            child_sum[parent[i] + 1] += q[i]
        else:
            q[i] = 0.0

    weight = [0.0] * count
    earlier = [0.0] * count
    for i, p in enumerate(parent):
        flow = 1.0
        if p != ROOT:
            flow = weight[p]
            depth[i] = depth[p] + turns[p]
            earlier[i] = earlier[p] + gamma ** depth[p] * reward[p]
        if valid[i]:
            weight[i] = flow / children[p + 1]
    parent_a = np.asarray(parent, np.int64)
    return Values(
        gamma=gamma,
        parent=parent_a,
        depth=np.asarray(depth, np.int64),
        leaf=np.asarray([a.next is None for a in actions], bool),
        valid=np.asarray(valid, bool),
        siblings=np.asarray(children, np.int64)[parent_a + 1],
        reward=np.asarray(reward, np.float64),
        q=np.asarray(q, np.float64),
        earlier=np.asarray(earlier, np.float64),
        weight=np.asarray(weight, np.float64),
        root_value=child_sum[0] / children[0] if children[0] else math.nan,
    )


def others_mean(values: Values) -> np.ndarray:
    """Mean q of an action's valid siblings without itself; 0 for only children and invalid ones.

    Returns:
      float64 [A]: (sum of q over the decision - q) / (K - 1).
    """
    return leave_one_out(values.q, values.valid, values.parent + 1)


def trajectory_returns(values: Values) -> tuple[np.ndarray, np.ndarray]:
    """Return-to-go of one trajectory through each action: on along first actions to its end.

    Returns:
      float64 [A], 0 where that trajectory has no return; bool [A], whether it has one.
    """
    depth, reward = values.depth.tolist(), values.reward.tolist()
    leaf, valid = values.leaf.tolist(), values.valid.tolist()
    found, lived = [0.0] * len(leaf), [False] * len(leaf)
    for i in reversed(range(len(leaf))):
        # In preorder the first action after this one is the next.
        lived[i] = valid[i] if leaf[i] else lived[i + 1]
        if lived[i]:
            later = 0.0 if leaf[i] else values.gamma ** (depth[i + 1] - depth[i]) * found[i + 1]
            found[i] = reward[i] + later
    return np.asarray(found, np.float64), np.asarray(lived, bool)


def leave_one_out(x: np.ndarray, counts: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Mean of the others of a group; 0 for what does not count and for what is alone.

    Args:
      x: float64 [A].
      counts: bool [A], what belongs to a mean.
      group: int64 [A], 0 or more.
    """
    size = np.bincount(group, weights=counts)[group]
    total = np.bincount(group, weights=np.where(counts, x, 0.0))[group]
    return np.where(counts & (size > 1), (total - x) / np.maximum(size - 1, 1), 0.0)


def _preorder(tree: tree_lib.Tree) -> tuple[list[tree_lib.Action], list[int]]:
    """Actions as ``tree.actions()`` lists them, each with the index of the action before it."""
    if not tree.root.actions:
        raise ValueError(f"tree {tree.task_id!r} has no actions")
    actions: list[tree_lib.Action] = []
    parent: list[int] = []
    stack = [(a, ROOT) for a in reversed(tree.root.actions)]
    while stack:
        action, above = stack.pop()
        index = len(actions)
        actions.append(action)
        parent.append(above)
        following = action.next.actions if action.next is not None else []
        if (action.end is None) == (not following):
            raise ValueError(
                f"action {index} of tree {tree.task_id!r} must either end its trajectory or be"
                f" followed by actions; it has end={action.end!r} and {len(following)} actions"
                " after it"
            )
        if action.end is not None and action.next is not None:
            raise ValueError(
                f"action {index} of tree {tree.task_id!r} ends with {action.end!r} but leads to"
                " another decision; set next to None"
            )
        stack.extend((a, index) for a in reversed(following))
    return actions, parent
