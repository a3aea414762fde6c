"""Actor-critic advantages on a tree: generalised advantage estimation with a learnt value.

A critic gives V for every decision. With c the decision after an action (GAE, arXiv 1506.02438):

    A(a) = r(a) + gamma V(c) - V(v) + gamma lambda mean of A over c's actions

V and the mean are 0 after the end. The critic's target at v is V(v) plus the mean of A over v's
actions: one target for a decision however many actions leave it, weighted by the flow that reaches
it. gamma and lambda count turns, not tokens, and not the parts of a turn.

With lambda = 1, A is Q - V: the policy gradient, whatever the critic says. With lambda < 1 it is
biased as far as the critic errs, and agrees in the mean with that of single trajectories.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gae:
    """Advantages and what the critic should learn.

    Attributes:
      advantage: float64 [A], 0 where no return lies below.
      target: float64 [D], 0 where no return lies below.
      weight: float64 [D], the flow that reaches a decision; 0 where no return lies below.
    """

    advantage: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def gae(tree: tree_lib.Tree, decision_values: np.ndarray, gamma: float, lam: float) -> Gae:
    """Advantages of a finished tree.

    Args:
      tree: flat or forked.
      decision_values: float64 [D], in the order of ``tree.decisions()``.
      gamma: discount per turn, in (0, 1].
      lam: lambda per turn, in [0, 1].

    Raises:
      ValueError: a setting out of range, an unfinished tree, or values that do not fit it.
    """
    return _gae(values.solve(tree, gamma), tree, decision_values, lam)


def _gae(solved: values.Values, tree: tree_lib.Tree, v: np.ndarray, lam: float) -> Gae:
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"lam is {lam}, expected a number in [0, 1]")
    decision = solved.decision
    count = int(decision.max()) + 1
    v = np.asarray(v, np.float64)
    if v.shape != (count,):
        raise ValueError(
            f"tree {tree.task_id!r} has {count} decisions, but its values have shape {v.shape}"
        )
    if not np.all(np.isfinite(v)):
        raise ValueError(f"tree {tree.task_id!r} has values that are not finite: {v}")
    # Sums over the actions of each decision, filled from the bottom up.
    total, valid = np.zeros(count), np.zeros(count)
    advantage = np.zeros(len(decision))
    for i in reversed(np.flatnonzero(solved.valid).tolist()):
        d = decision[i]
        advantage[i] = solved.reward[i] - v[d]
        if not solved.leaf[i]:
            # In preorder the first action after this one is the next.
            below, turns = decision[i + 1], solved.depth[i + 1] - solved.depth[i]
            later = v[below] + lam**turns * total[below] / valid[below]
            advantage[i] += solved.gamma**turns * later
        total[d] += advantage[i]
        valid[d] += 1.0
    mean = total / np.maximum(valid, 1.0)
    weight = np.bincount(decision, weights=solved.weight, minlength=count)
    return Gae(advantage=advantage, target=np.where(valid > 0, v + mean, 0.0), weight=weight)


def estimate(
    tree: tree_lib.Tree, *, decision_values: np.ndarray, gamma: float = 1.0, lam: float = 0.95
) -> api.Estimate:
    """`gae` with the flow weight times gamma^t as coefficient, and the critic's targets.

    Args:
      tree: finished, flat or forked.
      decision_values: float64 [D], what the critic says of each of ``tree.decisions()``.
      gamma: discount per turn, in (0, 1].
      lam: lambda per turn, in [0, 1].

    Raises:
      ValueError: as `gae`.
    """
    solved = values.solve(tree, gamma)
    found = _gae(solved, tree, decision_values, lam)
    return api.Estimate(
        advantage=found.advantage,
        coefficient=solved.weight * solved.discount,
        value_target=found.target,
        value_prediction=np.asarray(decision_values, np.float64),
        value_weight=found.weight,
    )


ALGORITHM = api.Algorithm(
    name="ppo",
    estimate=estimate,
    placements=("none", *api.PREDICTABLE),
    implies={"loss.value_weight": 0.5},
    critic=True,
)
