"""How the log-probability of each action moves with the parameters, in a few random directions.

With psi the gradient of an action's log-probability and u_1..u_D independent standard normal
directions,

    score[d] = psi . u_d / sqrt(D),    E score_i . score_j = psi_i . psi_j

so that the scores stand in for gradients wherever only inner products count, such as in the
variance of the gradient (`bpo_jax.estimators.by_turn`). One direction gives all actions of all
trees at once, by a central difference: two scoring passes, however many actions there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import packing
from bpo_jax.learner.update import Learner
from bpo_jax.packing import TreeBatch
from bpo_jax.tree import Tree

RELATIVE_STEP = 3e-3
"""Of a parameter tensor's size: large against rounding, small against what bends."""


def action_scores(
    learner: Learner,
    params: Any,
    trees: Sequence[Tree],
    batches: Sequence[TreeBatch],
    *,
    directions: int,
    seed: int,
) -> list[np.ndarray]:
    """Projected gradients of every action's log-probability.

    Args:
      learner: scores the batches.
      params: where the gradient is taken.
      trees: the trees.
      batches: what `packing.pack` made of them.
      directions: D. The relative error of an inner product is about sqrt(2 / D).
      seed: of the directions.

    Returns:
      float64 [A, D] for each tree; NaN for actions below which no return lies.
    """
    step = RELATIVE_STEP * float(_scale(params))
    there = [learner.put(batch) for batch in batches]
    columns: list[list[np.ndarray]] = []
    for index in range(directions):
        key = jax.random.fold_in(jax.random.key(seed), index)
        # Moved parameters live one after the other, beside the ones they come from.
        ends = [_sums(learner, _moved(params, key, s * step), trees, there) for s in (1.0, -1.0)]
        apart = zip(*ends, strict=True)
        columns.append([(up - down) / (2.0 * step) for up, down in apart])
    by_tree = zip(*columns, strict=True)
    return [np.stack(of_tree, axis=1) / np.sqrt(directions) for of_tree in by_tree]


def direction(params: Any, key: jax.Array) -> Any:
    """A standard normal direction, in the structure of the parameters."""
    leaves, treedef = jax.tree.flatten(params)
    drawn = [
        jax.random.normal(jax.random.fold_in(key, i), leaf.shape, jnp.float32)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, drawn)


@jax.jit
def _moved(params: Any, key: jax.Array, step: jax.Array) -> Any:
    return jax.tree.map(
        lambda p, u: (p.astype(jnp.float32) + step * u).astype(p.dtype),
        params,
        direction(params, key),
    )


@jax.jit
def _scale(params: Any) -> jax.Array:
    """Root mean square of all parameters."""
    leaves = jax.tree.leaves(params)
    square = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)
    return jnp.sqrt(square / sum(leaf.size for leaf in leaves))


def _sums(
    learner: Learner, params: Any, trees: Sequence[Tree], batches: Sequence[TreeBatch]
) -> list[np.ndarray]:
    """Log-probability of each action, float64 [A] for each tree."""
    host = jax.device_get(batches)
    scored = packing.unpack(trees, host, [learner.score(params, batch) for batch in batches])
    return [np.array([np.sum(x, dtype=np.float64) for x in of_tree]) for of_tree in scored]
