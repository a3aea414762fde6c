"""Trees written down by hand, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from bpo_jax.tree import Action, Decision, Tree


def leaf(reward: float = 0.0, end: str = "done") -> Action:
    return Action(reward=reward, end=end)


def masked() -> Action:
    return leaf(end="masked")


def edge(*below: Action, reward: float = 0.0, mid_turn: bool = False) -> Action:
    """An action that goes on to a decision with these children."""
    return Action(reward=reward, next=Decision(actions=list(below), mid_turn=mid_turn))


def tree(*roots: Action) -> Tree:
    return Tree(task_id="by hand", root=Decision(actions=list(roots)))


def flat(returns: Sequence[float], length: int = 1) -> Tree:
    """Independent trajectories of equal length that earn at the end."""
    roots = []
    for reward in returns:
        action = leaf(reward)
        for _ in range(length - 1):
            action = edge(action)
        roots.append(action)
    return tree(*roots)


_rewards = st.integers(-3, 3).map(float)
_leaves = st.builds(leaf, _rewards, st.sampled_from(["done", "truncated", "masked"]))
_actions = st.recursive(
    _leaves,
    lambda below: st.builds(
        lambda children, reward: edge(*children, reward=reward),
        st.lists(below, min_size=1, max_size=3),
        _rewards,
    ),
    max_leaves=12,
)
random_trees = st.lists(_actions, min_size=1, max_size=3).map(lambda roots: tree(*roots))
