"""Cloning: cross-entropy of demonstrated tokens, one optimiser step a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.learner import optimizer as optimizer_lib
from bpo_jax.learner import update as update_lib
from bpo_jax.models import decoder, scoring
from bpo_jax.packing import TreeBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloner:
    """The compiled functions; holds no state.

    Attributes:
      start: params -> a fresh `LearnerState` that owns a copy of them.
      put: batch -> the same on devices.
      step: (state, batch) -> (state, sums); donates the state, which comes back unchanged where the
        gradient is not finite or there is nothing to learn. `means` makes numbers of the sums.
    """

    start: Callable[[Any], update_lib.LearnerState]
    put: Callable[[TreeBatch], TreeBatch]
    step: Callable[[update_lib.LearnerState, TreeBatch], tuple[update_lib.LearnerState, jax.Array]]


def make(
    config: decoder.DecoderConfig,
    *,
    learning_rate: float,
    warmup: int,
    updates: int,
    context_weight: float,
    chunk: int,
    mesh: Mesh,
) -> Cloner:
    """Builds the functions for one policy.

    The loss is -sum_t c_t log p_t / sum_t c_t: c is the batch's ``coefficient`` at the tokens of
    actions and `context_weight` at tokens the policy only reads, whose prediction teaches a small
    policy to copy names.

    Args:
      config: the policy.
      learning_rate: the peak of AdamW's; it falls to a twentieth as a cosine.
      warmup: updates to the peak.
      updates: until the end of the cosine.
      context_weight: see above.
      chunk: tokens whose logits exist at the same time.
      mesh: rows are spread over it, every device holds the whole policy.
    """
    graphdef, _, _ = decoder.abstract(config)
    transform = optimizer_lib.make(
        optimizer_lib.OptimizerSettings(
            learning_rate=learning_rate,
            warmup=warmup,
            schedule="cosine",
            total=updates,
            final_fraction=0.05,
            b2=0.99,
            weight_decay=0.01,
        )
    )
    rows, whole = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)

    def objective(params: Any, batch: TreeBatch) -> tuple[jax.Array, jax.Array]:
        logprob_bt, _ = scoring.token_scores(graphdef, params, batch, chunk=chunk, mesh=mesh)
        action_bt = batch.coefficient
        read_bt = (batch.parent >= 0) & (batch.action_id < 0)
        weight_bt = action_bt + context_weight * read_bt
        loss = -jnp.sum(weight_bt * logprob_bt)
        action_loss = -jnp.sum(action_bt * logprob_bt)
        return loss, jnp.stack([loss, weight_bt.sum(), action_loss, action_bt.sum()])

    gradient = jax.grad(objective, has_aux=True)

    def step(state: update_lib.LearnerState, batch: TreeBatch) -> Any:
        grads, sums = gradient(state.params, batch)
        weight = sums[1]
        grads = jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1.0), grads)
        usable = jnp.isfinite(optax.tree.norm(grads)) & (weight > 0)
        changes, opt_state = transform.update(grads, state.opt_state, state.params)
        stepped = update_lib.LearnerState(
            params=optax.apply_updates(state.params, changes),
            opt_state=opt_state,
            step=state.step + 1,
        )
        kept = jax.tree.map(lambda new, old: jnp.where(usable, new, old), stepped, state)
        return kept, jnp.append(jnp.where(usable, sums, 0.0), 1.0 - usable)

    def start(params: Any) -> update_lib.LearnerState:
        return update_lib.LearnerState(
            params=jax.tree.map(jnp.copy, params),
            opt_state=transform.init(params),
            step=jnp.zeros((), jnp.int32),
        )

    return Cloner(
        start=jax.jit(start, out_shardings=whole),
        put=lambda batch: jax.device_put(batch, rows),
        step=jax.jit(
            step, in_shardings=(whole, rows), out_shardings=(whole, whole), donate_argnums=0
        ),
    )


def means(sums: Sequence[jax.Array]) -> dict[str, float]:
    """``loss``, and of action tokens alone ``loss/action`` and ``probability``, all per token.

    The probability is the geometric mean. ``skipped`` counts steps that left the policy as it was;
    they count nowhere else, and what no step is left for is NaN.
    """
    loss, weight, action_loss, actions, skipped = map(
        float, np.sum(jax.device_get(list(sums)), axis=0)
    )
    action_mean = action_loss / actions if actions else float("nan")
    return {
        "loss": loss / weight if weight else float("nan"),
        "loss/action": action_mean,
        "probability": float(np.exp(-action_mean)),
        "skipped": skipped,
    }
