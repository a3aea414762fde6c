"""Does branching pay on this task? Measured on the trees that were trained on.

At the first fork s of a root, the variance of a return splits in two:

    Var G = B + W,    B = Var V(s)  (which state was reached),    W = E Var(G | s)  (what follows)

Siblings share s, so their leave-one-out advantages are free of B. With K siblings, or N independent
trajectories,

    E A^2 = W K / (K - 1)    against    (B + W) N / (N - 1)

This compares squared advantages; the variance of the gradient also counts how many distinct states
were visited, which forks lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values

DEGENERATE = 1e-8
"""An advantage no larger than this trains nothing."""


def tree_diagnostics(
    trees: Sequence[tree_lib.Tree], estimates: Sequence[api.Estimate], *, gamma: float = 1.0
) -> dict[str, float]:
    """Variance split and advantage statistics of one update's trees.

    Only the first fork under each root is used, so that forks are comparable, with returns counted
    from the start. Each fork gives its children's mean m and variance s^2 (ddof 1):

        W = mean over forks of s^2
        B = mean over trees of [ variance of m over the tree's roots (ddof 1) - mean of s^2 / K ]

    Both are unbiased given that the roots forked, so B can come out negative; rho counts it as 0.
    Where forks are nested below, Q of a child is itself a mean and W is the variance of that.

    Args:
      trees: finished.
      estimates: one for each tree, any algorithm's.
      gamma: discount per action, in (0, 1].

    Returns:
      Each nan when no tree has the data for it:

      * ``diag/B``: needs a tree with two forked roots; ``diag/W``: needs a fork;
      * ``diag/rho``: B / (B + W);
      * ``diag/root_variance``: variance of Q over a tree's roots (ddof 1);
      * ``diag/advantage_square_forked``, ``diag/advantage_square_flat``: W K / (K - 1) and
        (B + W) N / (N - 1), with the mean K of those forks and N the mean number of returns;
      * ``diag/nondegenerate``: share of actions that count whose advantage is not 0;
      * ``diag/coefficient_sum``: mean over trees; its running mean can serve as flow_normalizer.
    """
    if len(trees) != len(estimates):
        raise ValueError(f"{len(trees)} trees but {len(estimates)} estimates; one each is needed")
    between: list[float] = []
    within: list[float] = []
    siblings: list[float] = []
    root_variance: list[float] = []
    returns: list[float] = []
    for tree in trees:
        solved = values.solve(tree, gamma)
        returns.append(float(np.sum(solved.leaf & solved.valid)))
        roots = solved.q[(solved.parent == values.ROOT) & solved.valid]
        if roots.size > 1:
            root_variance.append(float(np.var(roots, ddof=1)))
        forks = _first_forks(solved)
        fork_variance = [float(np.var(f, ddof=1)) for f in forks]
        within.extend(fork_variance)
        siblings.extend(float(f.size) for f in forks)
        if len(forks) > 1:
            noise = np.mean([v / f.size for v, f in zip(fork_variance, forks, strict=True)])
            between.append(float(np.var([f.mean() for f in forks], ddof=1) - noise))

    b, w = _mean(between), _mean(within)
    spread = max(b, 0.0) + w if not math.isnan(b) else math.nan
    k, n = _mean(siblings), _mean(returns)
    counted = [e.coefficient > 0.0 for e in estimates]
    moving = [np.abs(e.advantage[c]) > DEGENERATE for e, c in zip(estimates, counted, strict=True)]
    return {
        "diag/B": b,
        "diag/W": w,
        "diag/rho": max(b, 0.0) / spread if spread > 0.0 else math.nan,
        "diag/root_variance": _mean(root_variance),
        "diag/advantage_square_forked": w * k / (k - 1.0) if k > 1.0 else math.nan,
        "diag/advantage_square_flat": spread * n / (n - 1.0) if n > 1.0 else math.nan,
        "diag/nondegenerate": _mean(np.concatenate(moving)) if moving else math.nan,
        "diag/coefficient_sum": _mean([float(e.coefficient.sum()) for e in estimates]),
    }


def _first_forks(solved: values.Values) -> list[np.ndarray]:
    """Returns from the start of the children of each root's first fork, a float64 [K] each."""
    parent, siblings = solved.parent.tolist(), solved.siblings.tolist()
    valid, total = solved.valid.tolist(), solved.total.tolist()
    on_trunk = [False] * len(parent)
    found: dict[int, list[float]] = {}
    for i, p in enumerate(parent):
        if not valid[i]:
            continue
        if p == values.ROOT:
            on_trunk[i] = True
        elif on_trunk[p]:
            on_trunk[i] = siblings[i] == 1
            if siblings[i] > 1:
                found.setdefault(p, []).append(total[i])
    return [np.asarray(f, np.float64) for f in found.values()]


def _mean(numbers: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(numbers)) if len(numbers) else math.nan
