"""Branching policy optimisation, unbiased by construction.

The idea is the one of BPO (arXiv 2607.14171): sample siblings from the same state and let each be
judged against the others. The form here gives the exact policy gradient in expectation whenever the
number of children of a decision was fixed *before the first of them was drawn*, however that number
depends on the state, on other roots, on finished siblings or on a budget.

    g = sum_v sum_k  gamma^t w(a) grad log pi(a | s_v) (Q(a) - b(a)),    a the k-th child of v

with Q and w from `values`. The baseline b(a) may depend on anything whose mean, given the history,
the action itself does not move, as long as it is linear in the returns:

* at the root and at forks, the mean Q of the other children of v (leave-one-out, as in RLOO,
  arXiv 2402.14740);
* elsewhere, the baseline of the action before it, less the reward that action has earned, counted
  from here: b(a) = (b(before) - r(before)) / gamma, not divided in the middle of a turn. Down a
  chain this is the baseline of the nearest forking ancestor: siblings outside the chain's subtree;
* with one root, a constant the caller learnt from earlier updates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import api, values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrinkage:
    """Moves a fork's baseline from its few siblings towards the one inherited from above.

        b = alpha * leave-one-out + (1 - alpha) * inherited
        alpha = (B + sigma2) / (B + sigma2 + W / (K - 1))

    The numbers must come from *earlier* updates: estimated on the same trees they correlate with
    the returns they weigh, and the gradient is biased. For forks below other forks, B and sigma2
    are those given the fork above.

    Attributes:
      between: B, variance of the value between the states that forked.
      inherited: sigma2, variance of the inherited baseline; with M roots Var(V_root) / (M - 1).
      within: W, mean variance of the siblings' Q given their state.
    """

    between: float
    inherited: float
    within: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"shrinkage {field.name} is {value}, expected a variance >= 0")

    def alpha(self, siblings: int) -> float:
        """Weight of the leave-one-out mean at a fork with this many children (at least 2)."""
        signal = self.between + self.inherited
        noise = self.within / (siblings - 1)
        return signal / (signal + noise) if signal + noise > 0.0 else 1.0


def estimate(
    tree: tree_lib.Tree,
    *,
    gamma: float = 1.0,
    flow_exponent: float = 1.0,
    flow_normalizer: float = 1.0,
    baseline: float = 0.0,
    shrinkage: Sequence[Shrinkage] = (),
) -> api.Estimate:
    """Advantages Q - b and coefficients gamma^t w^e / normalizer of one tree.

    Args:
      tree: finished; decisions were given their number of children before the first was sampled.
      gamma: discount per action, in (0, 1].
      flow_exponent: e. 1 is the policy gradient; 0 lets every action count equally, which improves
        the policy state by state but is no longer the gradient of the return.
      flow_normalizer: a constant, for e other than 1 (a running mean of the sum of w^e over
        *earlier* trees keeps the step size; the same tree's sum would bias the direction).
      baseline: what one root alone is compared with; a constant from earlier updates.
      shrinkage: by how many forks lie above a fork, the last one serving all deeper forks; empty
        for plain leave-one-out. The root decision is never shrunk.

    Returns:
      The estimate; masked actions have advantage and coefficient 0.

    Raises:
      ValueError: a setting out of range, an unfinished tree, or forks chosen after the fact.
    """
    if any(decision.inclusion is not None for decision in tree.decisions()):
        raise ValueError(
            f"bpo wants forks that were decided before their children were drawn, but tree"
            f" {tree.task_id!r} has forks that were chosen after its backbone had ended; use"
            " algorithm.name='post_hoc_ht'"
        )
    if not (math.isfinite(flow_exponent) and flow_exponent >= 0.0):
        raise ValueError(f"flow_exponent is {flow_exponent}, expected a number >= 0")
    if not (math.isfinite(flow_normalizer) and flow_normalizer > 0.0):
        raise ValueError(f"flow_normalizer is {flow_normalizer}, expected a number > 0")
    solved = values.solve(tree, gamma)
    baseline_a = _baselines(solved, baseline, shrinkage)
    # 0 ** 0 is 1: without the mask an invalid action would count at e = 0.
    flow = np.where(solved.valid, solved.weight**flow_exponent, 0.0)
    return api.Estimate(
        advantage=np.where(solved.valid, solved.q - baseline_a, 0.0),
        coefficient=flow * solved.discount / flow_normalizer,
    )


def _baselines(
    solved: values.Values, constant: float, shrinkage: Sequence[Shrinkage]
) -> np.ndarray:
    """b of every action, float64 [A], in one walk from the roots down."""
    parent, reward = solved.parent.tolist(), solved.reward.tolist()
    siblings, valid = solved.siblings.tolist(), solved.valid.tolist()
    gamma, depth = solved.gamma, solved.depth.tolist()
    others = values.others_mean(solved).tolist()
    result = [0.0] * len(parent)
    forks_above = [0] * len(parent)
    for i, p in enumerate(parent):
        if not valid[i]:
            continue
        at_root = p == values.ROOT
        inherited, level = constant, 0
        if not at_root:
            inherited = (result[p] - reward[p]) / gamma ** (depth[i] - depth[p])
            level = forks_above[p]
        forks_above[i] = level
        if siblings[i] == 1:
            result[i] = inherited
            continue
        result[i] = others[i]
        if not at_root:
            forks_above[i] = level + 1
            if shrinkage:
                alpha = shrinkage[min(level, len(shrinkage) - 1)].alpha(siblings[i])
                result[i] = alpha * others[i] + (1.0 - alpha) * inherited
    return np.asarray(result, np.float64)


ALGORITHM = api.Algorithm(
    name="bpo",
    estimate=estimate,
    placements=(*api.PREDICTABLE, "none"),
)
