"""Branching policy optimisation as published (arXiv 2607.14171), kept for reproduction.

One backbone; after it has ended, its most uncertain boundaries are forked; the siblings of a fork
are compared with each other. With G the return of the trajectory that goes on from a sibling by
first actions alone (from the first sibling that is the backbone itself):

    A(sibling k) = G_k - mean of the other siblings' G

An action carries the advantage of the sibling it lies under, down to the next fork. To what the
siblings of a fork share, a copy goes back up, fading by lambda at every step:

    A(a) = A(sibling above a) + sum over forks v below a of  lambda^(steps from a to v) copy(v)

    copy(v) = A(first sibling of v)              propagate = "backbone"
            = mean over the siblings of v of A   propagate = "siblings"

What is known about it, and shown in the tests:

* chosen after the fact, forks say what came after them: the gradient is biased;
* the siblings' copies cancel, in every single outcome: they train nothing above the first fork;
* the backbone's copy has mean zero where the choice of forks does not depend on actions at or after
  them; where it does, what is left is not zero and is biased;
* every action counts the same however often the tree branched.
"""

from __future__ import annotations

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values

PROPAGATE = ("backbone", "siblings")


def estimate(
    tree: tree_lib.Tree, *, gamma: float = 1.0, lam: float = 0.95, propagate: str = "backbone"
) -> api.Estimate:
    """The published advantages, and 1 / (number of returns) as every action's coefficient.

    Args:
      tree: finished. Several roots are siblings of each other.
      gamma: discount per turn, in (0, 1]; returns are counted from the start.
      lam: lambda, by how much a copy fades at every step towards the start, in [0, 1].
      propagate: whose advantage is copied to what siblings share.

    Raises:
      ValueError: a setting out of range or an unfinished tree.
    """
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"lam is {lam}, expected a number in [0, 1]")
    if propagate not in PROPAGATE:
        raise ValueError(f"propagate is {propagate!r}, expected one of {', '.join(PROPAGATE)}")
    solved = values.solve(tree, gamma)
    going_on, lived = values.trajectory_returns(solved)
    group = solved.parent + 1
    size = np.bincount(group, weights=lived)[group]
    total = solved.earlier + solved.discount * going_on
    others = values.leave_one_out(total, lived, group)
    compared = lived & (size > 1)
    sibling = np.where(compared, total - others, 0.0)

    parent = solved.parent.tolist()
    own = sibling.copy()
    for i, p in enumerate(parent):
        if p != values.ROOT and not compared[i]:
            own[i] = own[p]
    copied = np.where(solved.first, sibling, 0.0)
    if propagate == "siblings":
        copied = np.where(compared, sibling / np.maximum(size, 1), 0.0)
    fading = np.zeros(len(parent))
    for i in reversed(range(len(parent))):
        if parent[i] != values.ROOT:
            fading[parent[i]] += lam * (copied[i] + fading[i])
    returns = np.sum(solved.leaf & solved.valid)
    return api.Estimate(
        advantage=np.where(solved.valid, own + fading, 0.0),
        coefficient=solved.valid / max(returns, 1),
    )


ALGORITHM = api.Algorithm(
    name="bpo_paper",
    estimate=estimate,
    placements=("post_hoc_top_m", *api.PREDICTABLE),
    implies={
        "algorithm.roots": 1,
        "branching.forks_per_root": 3,
        "branching.siblings": 4,
        "loss.kl_weight": 0.05,
    },
)
