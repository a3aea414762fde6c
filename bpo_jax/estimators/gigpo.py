"""GiGPO (arXiv 2505.10978): compare trajectories, and beside that steps from the same observation.

    A(a) = G(a) - mean of the other trajectories' G
         + omega (Q(a) - mean of Q over other trajectories' actions taken at the same observation)

G is the undiscounted return from the start, Q the return-to-go discounted by gamma. Published with
means that include the trajectory itself and divided by deviations; here a trajectory stands in none
of its own baselines and nothing is divided.

The first term is the policy gradient. The second points, at every state, where the policy gets
better, but weighs states by how probable it is that another trajectory comes there: the whole is
not the gradient of the return unless omega is 0.
"""

from __future__ import annotations

import math

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


def estimate(tree: tree_lib.Tree, *, gamma: float = 0.95, omega: float = 1.0) -> api.Estimate:
    """Episode advantages plus omega times step advantages; the coefficient is the flow weight.

    Two observations are the same where their texts are. In a tree, an action's return is the
    flow-weighted mean of those below it, and so are means over actions; actions above and below
    lie on its own trajectories and are left out of its baseline. In the middle of a turn nothing is
    observed: there an action is compared with its siblings.

    Args:
      tree: finished, flat or forked.
      gamma: discount per turn of the steps' returns, in (0, 1].
      omega: weight of the step advantage, 0 or more.

    Raises:
      ValueError: a setting out of range or an unfinished tree.
    """
    if not (math.isfinite(omega) and omega >= 0.0):
        raise ValueError(f"omega is {omega}, expected a number >= 0")
    episode = values.solve(tree, 1.0)
    root = np.cumsum(episode.parent == values.ROOT) - 1
    root_q = episode.q[episode.parent == values.ROOT]
    root_valid = episode.valid[episode.parent == values.ROOT]
    baseline = values.leave_one_out(root_q, root_valid, np.zeros(len(root_q), np.int64))[root]
    advantage = episode.total - baseline
    if omega:
        advantage += omega * _step_advantages(tree, values.solve(tree, gamma))
    return api.Estimate(
        advantage=np.where(episode.valid, advantage, 0.0), coefficient=episode.weight
    )


def _step_advantages(tree: tree_lib.Tree, solved: values.Values) -> np.ndarray:
    """Q less the mean Q of others at the same observation; 0 where there are none. float64 [A]."""
    end = _subtree_ends(solved.parent)
    name: dict[object, int] = {}
    group_of_decision = [
        name.setdefault(id(d) if d.mid_turn else d.observation, len(name)) for d in tree.decisions()
    ]
    group = np.asarray(group_of_decision, np.int64)[solved.decision]
    result = np.zeros(len(group))
    for members in _split(group, solved.valid):
        below = (members[:, None] < members) & (members < end[members][:, None])
        other = ~(below | below.T)
        np.fill_diagonal(other, False)
        weight = other * solved.weight[members]
        total = weight.sum(axis=1)
        mean = weight @ solved.q[members] / np.where(total > 0.0, total, 1.0)
        result[members] = np.where(total > 0.0, solved.q[members] - mean, 0.0)
    return result


def _subtree_ends(parent: np.ndarray) -> np.ndarray:
    """int64 [A], one past the last action below each, in preorder."""
    end = np.arange(1, len(parent) + 1)
    for i in reversed(range(len(parent))):
        if parent[i] != values.ROOT:
            end[parent[i]] = max(end[parent[i]], end[i])
    return end


def _split(group: np.ndarray, valid: np.ndarray) -> list[np.ndarray]:
    """Indices of the valid actions of each group."""
    index = np.flatnonzero(valid)
    order = index[np.argsort(group[index], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []


ALGORITHM = api.Algorithm(
    name="gigpo",
    estimate=estimate,
    placements=("none", *api.PREDICTABLE),
    implies={"algorithm.gamma": 0.95},
)
