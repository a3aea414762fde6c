"""The update: gradients accumulated over micro-batches of one shape, then one optimiser step.

Everything jitted takes plain pytrees; the module's static description is closed over, parameters
never are. Accumulators and the state are donated, so a step needs one copy of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bpo_jax.learner import loss as loss_lib
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.learner import optimizer as optimizer_lib
from bpo_jax.models import decoder, scoring
from bpo_jax.packing import TreeBatch

Params = Any


class NonFiniteGradients(RuntimeError):
    """A gradient was NaN or infinite; the parameters were left as they were."""

    one_line = True  # the message says everything; a traceback would only hide it


class NothingToTrain(RuntimeError):
    """No tree had an action that counts; the parameters were left as they were."""

    one_line = True  # as above


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerState:
    """What an update changes.

    Attributes:
      params: nested dictionary of arrays.
      opt_state: the optimiser's.
      step: int32 scalar, optimiser steps taken.
    """

    params: Params
    opt_state: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """The compiled functions of one model, loss and optimiser; holds no state.

    Attributes:
      place: params -> params, on the mesh.
      start: params -> a fresh `LearnerState` that owns a copy of them.
      put: micro-batch -> the same on devices.
      zeros: params -> (gradient accumulator, summed metrics).
      accumulate: (params, accumulators, micro-batch) -> accumulators; donates the accumulators.
      apply: (state, accumulators) -> (state, summed metrics with ``grad_norm`` and ``finite``);
        donates the state. With a non-finite gradient it comes back unchanged.
      score: (params, micro-batch) -> log-probs [B, T] of every token at its parent.
      values: (params, micro-batch) -> values [B, T] of every token's parent; only with a critic.
    """

    place: Callable[[Params], Params]
    start: Callable[[Params], LearnerState]
    put: Callable[[TreeBatch], TreeBatch]
    zeros: Callable[[Params], Any]
    accumulate: Callable[[Params, Any, TreeBatch], Any]
    apply: Callable[[LearnerState, Any], tuple[LearnerState, dict[str, jax.Array]]]
    score: Callable[[Params, TreeBatch], jax.Array]
    values: Callable[[Params, TreeBatch], jax.Array]


def make(
    config: decoder.DecoderConfig,
    *,
    loss: loss_lib.LossSettings,
    optimizer: optimizer_lib.OptimizerSettings,
    temperature: float = 1.0,
    chunk: int = 1024,
    train_trunk: bool = False,
    mesh: Mesh | None = None,
) -> Learner:
    """Builds the learner of one run.

    Args:
      config: the policy.
      loss: clip range and weights.
      optimizer: AdamW and its schedule.
      temperature: at which actions are sampled; all log-probs and entropies are at it.
      chunk: tokens whose logits exist at the same time.
      train_trunk: whether the critic's loss changes more than the value head.
      mesh: devices to shard over; one device where None.
    """
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    if config.attention == "auto" and mesh.devices.flat[0].platform == "tpu":
        config = dataclasses.replace(config, attention="flash")
    graphdef, shapes, axes = decoder.abstract(config)
    transform = optimizer_lib.make(optimizer)
    whole = mesh_lib.replicated(mesh)
    on_params = mesh_lib.param_shardings(mesh, shapes, axes)
    on_state = _state_shardings(transform, shapes, on_params, whole)
    rows = mesh_lib.batch_sharding(mesh)

    def scores(params: Params, batch: TreeBatch) -> tuple[jax.Array, jax.Array]:
        return scoring.token_scores(
            graphdef, params, batch, temperature=temperature, chunk=chunk, mesh=mesh
        )

    def scores_and_values(params: Params, batch: TreeBatch) -> tuple[jax.Array, ...]:
        return scoring.token_scores_and_values(
            graphdef, params, batch, train_trunk=train_trunk, temperature=temperature, chunk=chunk,
            mesh=mesh,
        )  # fmt: skip

    def objective(params: Params, batch: TreeBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        if loss.value_weight:
            logprob_bt, entropy_bt, value_bt = scores_and_values(params, batch)
            return loss_lib.tree_loss(logprob_bt, entropy_bt, batch, loss, value_bt)
        logprob_bt, entropy_bt = scores(params, batch)
        return loss_lib.tree_loss(logprob_bt, entropy_bt, batch, loss)

    gradient = jax.grad(objective, has_aux=True)

    def zeros(params: Params) -> Any:
        # Sums are kept in float32 whatever the parameters are stored in.
        accumulated = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return accumulated, {name: jnp.zeros(()) for name in loss_lib.sum_names(loss)}

    def accumulate(params: Params, total: Any, batch: TreeBatch) -> Any:
        return jax.tree.map(lambda old, new: old + new, total, gradient(params, batch))

    def apply(state: LearnerState, total: Any) -> tuple[LearnerState, dict[str, jax.Array]]:
        grads, sums = total
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        stepped = LearnerState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
        )
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, state)
        return kept, sums | {"grad_norm": norm, "finite": finite}

    def start(params: Params) -> LearnerState:
        return LearnerState(
            params=jax.tree.map(jnp.copy, params),
            opt_state=transform.init(params),
            step=jnp.zeros((), jnp.int32),
        )

    totals = (on_params, whole)
    return Learner(
        place=lambda params: jax.device_put(params, on_params),
        start=jax.jit(start, in_shardings=(on_params,), out_shardings=on_state),
        put=lambda batch: jax.device_put(batch, rows),
        zeros=jax.jit(zeros, in_shardings=(on_params,), out_shardings=totals),
        accumulate=jax.jit(
            accumulate,
            in_shardings=(on_params, totals, rows),
            out_shardings=totals,
            donate_argnums=1,
        ),
        apply=jax.jit(
            apply,
            in_shardings=(on_state, totals),
            out_shardings=(on_state, whole),
            donate_argnums=0,
        ),
        score=jax.jit(
            lambda params, batch: scores(params, batch)[0],
            in_shardings=(on_params, rows),
            out_shardings=rows,
        ),
        values=jax.jit(
            lambda params, batch: scores_and_values(params, batch)[2],
            in_shardings=(on_params, rows),
            out_shardings=rows,
        ),
    )


def update(
    learner: Learner,
    state: LearnerState,
    minibatches: Sequence[Sequence[TreeBatch]],
    *,
    epochs: int = 1,
) -> tuple[LearnerState, dict[str, float]]:
    """Takes one optimiser step for every minibatch of every epoch.

    Args:
      learner: see `make`.
      state: donated; use the one returned.
      minibatches: each a list of micro-batches of one shape; their coefficients already hold the
        constants of the loss. One without micro-batches (every tree masked) is skipped.
      epochs: passes over all minibatches.

    Returns:
      The new state and the logged numbers. ``rollout/logprob_gap`` is that of the first minibatch
      of the first epoch, the only one compared with the parameters it was sampled from.
      ``diag/skipped`` counts steps that were left out because there was nothing to train on or a
      gradient was not finite. Where no step had anything, the gradient's norm is 0 and nothing else
      is known.
    """
    on_device = [[learner.put(b) for b in minibatch] for minibatch in minibatches if minibatch]
    empty = epochs * (len(minibatches) - len(on_device))
    if not on_device:
        return state, {"diag/grad_norm": 0.0, "diag/skipped": float(empty)}
    steps = []
    for _ in range(epochs):
        for minibatch in on_device:
            total = learner.zeros(state.params)
            for batch in minibatch:
                total = learner.accumulate(state.params, total, batch)
            state, sums = learner.apply(state, total)
            steps.append(sums)
    steps = jax.device_get(steps)  # the one wait for the device
    everything = {name: sum(float(sums[name]) for sums in steps) for name in steps[0]}
    metrics = loss_lib.finish_metrics(everything)
    for name in metrics.keys() & {"loss/policy", "loss/kl", "loss/value"}:
        metrics[name] /= len(steps)
    metrics["rollout/logprob_gap"] = loss_lib.finish_metrics(steps[0])["rollout/logprob_gap"]
    metrics["diag/grad_norm"] = everything["grad_norm"] / len(steps)
    metrics["diag/skipped"] = empty + len(steps) - everything["finite"]
    return state, metrics


def check_finite(metrics: dict[str, float], *, step: int) -> None:
    """Says in one line that an update was skipped.

    Raises:
      NonFiniteGradients: at least one optimiser step of this update was skipped for its gradient.
      NothingToTrain: there was nothing in the whole update to train on.
    """
    if "loss/policy" not in metrics:
        raise NothingToTrain(
            f"update {step}: not one trajectory of the last updates could be trained on; see the "
            "warnings above for tasks that could not be started, and tree/masked"
        )
    if not math.isfinite(metrics["diag/grad_norm"]):
        raise NonFiniteGradients(
            f"update {step}: gradient norm {metrics['diag/grad_norm']}, so the update was skipped "
            "and the parameters are unchanged; lower optimizer.learning_rate, or set "
            f"loss.dual_clip if diag/approx_kl ({metrics['diag/approx_kl']:.3g}) is large"
        )


def _state_shardings(transform: Any, shapes: Any, on_params: Any, whole: Any) -> LearnerState:
    """Adam's moments live where their parameters do, counters everywhere."""
    opt_state = optax.tree.map_params(
        transform,
        lambda _, where: where,
        jax.eval_shape(transform.init, shapes),
        on_params,
        transform_non_params=lambda _: whole,
    )
    return LearnerState(params=on_params, opt_state=opt_state, step=whole)
