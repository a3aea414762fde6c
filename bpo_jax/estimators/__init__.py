"""Advantages of a tree's actions, as pure float64 functions that do not know where it came from.

An algorithm is one file with an `Algorithm` in it, listed in `ALGORITHMS`; a config picks one by
name. `diagnostics` and `depths` measure on the same trees whether branching pays, `exact` measures
whether an estimator is what it claims to be.
"""

from bpo_jax.estimators import bpo, bpo_paper, gigpo, grpo, post_hoc_ht, ppo, rloo, vineppo
from bpo_jax.estimators.api import Algorithm, Estimate
from bpo_jax.estimators.bpo import Shrinkage
from bpo_jax.estimators.depths import by_turn
from bpo_jax.estimators.diagnostics import tree_diagnostics
from bpo_jax.estimators.values import Values, solve

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        bpo.ALGORITHM,
        bpo_paper.ALGORITHM,
        post_hoc_ht.ALGORITHM,
        grpo.ALGORITHM,
        grpo.DR_GRPO,
        rloo.ALGORITHM,
        gigpo.ALGORITHM,
        vineppo.ALGORITHM,
        ppo.ALGORITHM,
    )
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Estimate",
    "Shrinkage",
    "Values",
    "by_turn",
    "solve",
    "tree_diagnostics",
]
