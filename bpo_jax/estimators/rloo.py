"""REINFORCE with a leave-one-out baseline over whole trajectories (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


def estimate(
    tree: tree_lib.Tree, *, gamma: float = 1.0, row_per_step: bool = False
) -> api.Estimate:
    """Advantages G_i - mean of the other G_j, the same for all actions of trajectory i.

    G is the discounted return from the start, so the coefficient is 1/N without a power of gamma.
    Unbiased. A trajectory left alone by masking has baseline 0.

    Args:
      tree: finished and flat: N roots and no fork.
      gamma: discount per action, in (0, 1].
      row_per_step: treat every *action* as a row with its trajectory's return, and average over all
        other rows, as some public baselines for multi-turn agents do. Long trajectories dominate
        that mean, and a trajectory's other actions stand in its own baseline: biased. For
        comparison with those baselines only.

    Raises:
      ValueError: the tree has forks, gamma is out of range, or a trajectory has not ended.
    """
    forks = len(tree.forks())
    if forks:
        raise ValueError(
            f"rloo compares independent trajectories, but tree {tree.task_id!r} has {forks} forks;"
            " grow it without branching or use bpo"
        )
    solved = values.solve(tree, gamma)
    root_of = np.flatnonzero(solved.parent == values.ROOT)[_root_rank(solved)]
    return_a = solved.q[root_of]
    if row_per_step:
        rows = int(solved.valid.sum())
        total = return_a[solved.valid].sum()
        baseline_a = (total - return_a) / (rows - 1) if rows > 1 else np.zeros_like(return_a)
    else:
        baseline_a = values.others_mean(solved)[root_of]
    return api.Estimate(
        advantage=np.where(solved.valid, return_a - baseline_a, 0.0),
        coefficient=solved.weight,
    )


def _root_rank(solved: values.Values) -> np.ndarray:
    """int64 [A], which root an action lies under: in preorder a root opens its trajectory."""
    return np.cumsum(solved.parent == values.ROOT) - 1


ALGORITHM = api.Algorithm(name="rloo", estimate=estimate, placements=("none",))
