"""The policy gradient from forks chosen after the fact, each divided by its probability.

A finished backbone says where to fork: decision t is chosen by a coin of its own whose probability
p_t may depend on the whole backbone, and gets fresh siblings (Horvitz and Thompson, 1952):

    g = mean over roots of  sum_t  beta_t + [t chosen] / p_t (fresh_t - beta_t)

beta_t is the backbone's own term, its action scored by its return and the other backbones', and
blind to what is fresh. fresh_t scores the actions taken at t by the fresh siblings, each against
the mean Q of all other children of t; what they do further down is not trained. The start is not
forked: there the roots are compared with each other.

Given the backbone, the bracket has mean fresh_t - beta_t, so beta_t cancels: it only steadies the
sum. A decision that could not be chosen keeps beta_t alone, which is right where being a candidate
does not depend on what comes after.
"""

from __future__ import annotations

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


def estimate(tree: tree_lib.Tree, *, gamma: float = 1.0, baseline: float = 0.0) -> api.Estimate:
    """Advantages, and coefficients gamma^t (1 - [chosen] / p) or gamma^t / p / (fresh siblings).

    Coefficients may be negative. A backbone lost to a failure is left out with all its forks.

    Args:
      tree: finished; every fork lies on a backbone and has its `inclusion`.
      gamma: discount per turn, in (0, 1].
      baseline: what one root alone is compared with; a constant from earlier updates.

    Raises:
      ValueError: gamma out of range, an unfinished tree, a fork that was not chosen after the fact,
        or a probability out of (0, 1].
    """
    solved = values.solve(tree, gamma)
    backbone = solved.backbone
    probability = _probabilities(tree, solved)
    going_on, lived = values.trajectory_returns(solved)
    at_root = solved.parent == values.ROOT
    kept = np.where(at_root, lived, False)
    for i, p in enumerate(solved.parent.tolist()):
        kept[i] |= p != values.ROOT and kept[p]
    roots = np.sum(at_root & kept)

    # The backbones alone: leave-one-out at the start, inherited further down.
    compared = np.zeros(len(going_on))
    if roots > 1:
        start = np.where(at_root, 0, 1)
        compared = values.leave_one_out(going_on, at_root & kept, start)
    else:
        compared[at_root] = baseline
    for i in np.flatnonzero(backbone & ~at_root).tolist():
        above = solved.parent[i]
        steps = solved.depth[i] - solved.depth[above]
        compared[i] = (compared[above] - solved.reward[above]) / gamma**steps

    beside = ~backbone & backbone[np.maximum(solved.parent, 0)]
    fresh = kept & solved.valid & beside
    count = np.bincount(solved.parent + 1, weights=fresh)[solved.parent + 1]
    share = np.zeros(len(going_on))
    share[backbone] = 1.0
    chosen = backbone & (count > 0)
    share[chosen] -= 1.0 / probability[chosen]
    share[fresh] = 1.0 / probability[fresh] / count[fresh]
    used = kept & (backbone | fresh)
    advantage = np.where(backbone, going_on - compared, solved.q - values.others_mean(solved))
    return api.Estimate(
        advantage=np.where(used, advantage, 0.0),
        coefficient=np.where(used, share * solved.discount, 0.0) / max(roots, 1),
    )


def _probabilities(tree: tree_lib.Tree, solved: values.Values) -> np.ndarray:
    """float64 [A], that of the fork an action was taken at; nan elsewhere."""
    probability = []
    _, opens = np.unique(solved.parent, return_index=True)
    for decision, first in zip(tree.decisions(), opens.tolist(), strict=True):
        given = decision.inclusion
        if decision is not tree.root and len(decision.actions) > 1:
            if given is None or not 0.0 < given <= 1.0:
                raise ValueError(
                    f"a fork of tree {tree.task_id!r} has inclusion={given}, expected the"
                    " probability, above 0, with which it was chosen; grow it with"
                    " branching.placement='post_hoc_ht'"
                )
            if not solved.backbone[first]:
                raise ValueError(
                    f"tree {tree.task_id!r} forks below a fresh sibling; only backbones may fork"
                )
        probability.append(np.nan if given is None else given)
    return np.asarray(probability, np.float64)[solved.decision]


ALGORITHM = api.Algorithm(name="post_hoc_ht", estimate=estimate, placements=("post_hoc_ht",))
