"""Advantages of a tree's actions, as pure float64 functions that do not know where it came from.

An algorithm is one file with an `Algorithm` in it, listed in `ALGORITHMS`; a config picks one by
name. `diagnostics` measures on the same trees whether branching pays.
"""

from bpo_jax.estimators import bpo, grpo, rloo
from bpo_jax.estimators.api import Algorithm, Estimate
from bpo_jax.estimators.bpo import Shrinkage
from bpo_jax.estimators.diagnostics import tree_diagnostics
from bpo_jax.estimators.values import Values, solve

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a for a in (bpo.ALGORITHM, grpo.ALGORITHM, grpo.DR_GRPO, rloo.ALGORITHM)
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Estimate",
    "Shrinkage",
    "Values",
    "solve",
    "tree_diagnostics",
]
