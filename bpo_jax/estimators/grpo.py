"""Group-relative advantages: every return against its group's mean, in units of its deviation.

GRPO (arXiv 2402.03300), and Dr. GRPO (arXiv 2503.20783), which does not divide. A return sits in
its own mean, so the flat Dr. GRPO is (1 - 1/N) times the policy gradient. Dividing by a deviation
that the same returns make up turns the direction too, except where returns take two values.
"""

from __future__ import annotations

import math

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


def grpo(tree: tree_lib.Tree, *, gamma: float = 1.0, epsilon: float = 1e-6) -> api.Estimate:
    """Advantages (G - mu) / (sigma + epsilon), with G the return from the start.

    With w the flow weights of the leaves (1/N each in a flat group of N):

        mu = sum_l w_l G_l,    sigma^2 = sum_l w_l (G_l - mu)^2

    An action above several leaves takes the flow-weighted mean of their returns. G is discounted
    from the start, so the coefficient, the flow weight, carries no power of gamma.

    Args:
      tree: finished, flat or forked.
      gamma: discount per action, in (0, 1].
      epsilon: keeps a group of equal returns finite; their advantages are 0.

    Raises:
      ValueError: a setting out of range or an unfinished tree.
    """
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise ValueError(f"epsilon is {epsilon}, expected a number > 0")
    solved = values.solve(tree, gamma)
    centred = _centred(solved)
    leaf = solved.leaf & solved.valid
    sigma = math.sqrt(np.sum(solved.weight[leaf] * centred[leaf] ** 2))
    return api.Estimate(advantage=centred / (sigma + epsilon), coefficient=solved.weight)


def dr_grpo(tree: tree_lib.Tree, *, gamma: float = 1.0) -> api.Estimate:
    """Advantages G - mu, otherwise as `grpo`."""
    solved = values.solve(tree, gamma)
    return api.Estimate(advantage=_centred(solved), coefficient=solved.weight)


def _centred(solved: values.Values) -> np.ndarray:
    # The flow-weighted mean of the leaves' returns is the root decision's value.
    return np.where(solved.valid, solved.total - solved.root_value, 0.0)


ALGORITHM = api.Algorithm(
    name="grpo",
    estimate=grpo,
    placements=("none", *api.PREDICTABLE),
)
DR_GRPO = api.Algorithm(
    name="dr_grpo",
    estimate=dr_grpo,
    placements=("none", *api.PREDICTABLE),
)
