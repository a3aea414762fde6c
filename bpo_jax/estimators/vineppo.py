"""VinePPO (arXiv 2410.01679): values of states from auxiliary rollouts that are not trained on.

On a tree, the trajectories that go from a root by first actions alone are trained. All other
children of a fork are *auxiliary* actions: what is below them counts for values and has coefficient
0.

    V(v) = mean Q of v's auxiliary actions
    A(a) = r(a) + gamma V(next(a)) - V(v),    V(end) = 0

so that the trained action is in no estimate that it is measured by. Where a decision has no
auxiliary actions the trained trajectory itself stands in: as the next decision's value, its reward
and the value after it (A is then the advantage over several steps), and as what to compare with,
the value before it less the reward since. At the start, where the roots are each other's auxiliary
rollouts, the value is the mean Q of the other roots, 0 for a root alone.

With auxiliary actions that were settled before they were drawn this is the policy gradient,
whatever their number, and however few decisions have them.
"""

from __future__ import annotations

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


def estimate(tree: tree_lib.Tree, *, gamma: float = 1.0) -> api.Estimate:
    """Advantages of the trained trajectories and coefficients gamma^t / (number of them).

    A root whose trained trajectory was lost to a failure is not trained; what its auxiliary
    rollouts earned still counts where other roots are compared with it.

    Args:
      tree: finished.
      gamma: discount per turn, in (0, 1].

    Raises:
      ValueError: gamma out of range or an unfinished tree.
    """
    solved = values.solve(tree, gamma)
    _, lived = values.trajectory_returns(solved)
    auxiliary = solved.valid & ~solved.first
    group = solved.parent + 1
    # Entry i + 1 belongs to the decision after action i.
    shape = len(solved.parent) + 1
    count = np.bincount(group, weights=auxiliary, minlength=shape)
    total = np.bincount(group, weights=np.where(auxiliary, solved.q, 0.0), minlength=shape)
    others = values.others_mean(solved)

    parent, reward, depth = solved.parent.tolist(), solved.reward.tolist(), solved.depth.tolist()
    # The trained trajectory of a root whose end has a return, and nothing else.
    trained = solved.backbone & lived
    index = np.flatnonzero(trained).tolist()
    compared, target = np.zeros(len(parent)), np.zeros(len(parent))
    for i in index:
        p = parent[i]
        if p == values.ROOT:
            compared[i] = others[i]
        elif count[p + 1]:
            compared[i] = total[p + 1] / count[p + 1]
        else:
            compared[i] = (compared[p] - reward[p]) / gamma ** (depth[i] - depth[p])
    for i in reversed(index):
        target[i] = reward[i]
        if not solved.leaf[i]:
            after = total[i + 1] / count[i + 1] if count[i + 1] else target[i + 1]
            target[i] += gamma ** (depth[i + 1] - depth[i]) * after
    roots = np.sum(trained & (solved.parent == values.ROOT))
    return api.Estimate(
        advantage=np.where(trained, target - compared, 0.0),
        coefficient=trained * solved.discount / max(roots, 1),
    )


ALGORITHM = api.Algorithm(
    name="vineppo",
    estimate=estimate,
    # Evenly spaced: with as many forks a root as there are turns, at every decision, as published.
    placements=("uniform", "fixed", "threshold", "random", "oracle"),
)
