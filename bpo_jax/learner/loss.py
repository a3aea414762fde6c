"""The one loss of every algorithm: clipped policy gradient, KL, entropy and value at node level.

A token of the tree is in the batch once, so it has one behaviour log-prob, one ratio, one
advantage and one coefficient. With q the token's coefficient (flow weight over the constants P and
C, both the same in every minibatch), A its advantage, r its ratio, u its importance weight, H the
entropy of pi(.|s), V the predicted value, and sums over sampled tokens and over decisions:

  L = - sum q u f(r, A)  +  kl_weight sum q k(a|s)  -  entropy_weight sum q H
      + value_weight sum over decisions of  w (V - target)^2 / 2

  ratio "token":    r = pi(a|s) / anchor(a|s)
  ratio "action":   r = exp(mean over the action's tokens of log pi - log anchor), for all of them
  no importance_cap:  anchor = behaviour, what it was sampled with;  u = 1
  importance_cap c:   anchor = the learner's own policy before the update;
                      u = min(anchor / behaviour, c), of the token or of the action, a constant

Everything is a sum, never a mean: the losses and gradients of micro-batches add up to those of the
whole batch exactly. All log-probs are of the distribution at the sampling temperature.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before exp; far outside every clip range, and exp(20)**2 is finite."""

KL_ESTIMATORS = ("k1", "k2", "k3")
RATIOS = ("token", "action")

SUMS = (
    "policy", "tokens", "entropy", "clipped", "approx_kl", "ratio", "ratio_squared", "gap",
)  # fmt: skip
REFERENCE_SUMS = ("kl", "reference_kl")
IMPORTANCE_SUMS = ("capped",)
VALUE_SUMS = ("value", "value_weights", "value_residual", "value_target", "value_target_squared")


class LossTokens(Protocol):
    """The fields of a `bpo_jax.packing.TreeBatch` the loss reads, all [B, T]."""

    @property
    def loss_mask(self) -> Any: ...

    @property
    def advantage(self) -> Any: ...

    @property
    def coefficient(self) -> Any: ...

    @property
    def behaviour_logprob(self) -> Any: ...

    @property
    def reference_logprob(self) -> Any: ...

    @property
    def proximal_logprob(self) -> Any: ...

    @property
    def value_target(self) -> Any: ...

    @property
    def value_prediction(self) -> Any: ...

    @property
    def value_weight(self) -> Any: ...

    @property
    def action_id(self) -> Any: ...

    @property
    def tree_id(self) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What is added up, and with which weight.

    Attributes:
      clip_low: the ratio is clipped below at 1 - clip_low.
      clip_high: and above at 1 + clip_high.
      dual_clip: where the advantage A is negative, f is at least ``dual_clip * A``; None for no
        bound.
      ratio: "token", or "action" for one ratio an action, the geometric mean of its tokens'.
      importance_cap: most that the gap between sampler and learner may weigh a token or an action;
        None leaves the gap in the ratio.
      kl_weight: weight of the KL to the reference policy; 0 leaves the reference out altogether.
      kl_estimator: "k1", "k2" or "k3", see `kl_estimate`.
      entropy_weight: weight of the entropy bonus.
      value_weight: weight of the critic's loss; 0 where there is no critic.
      value_clip: a value counts as moved from what it was at most this far, if that is worse for
        it; None for no bound.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio: str = "token"
    importance_cap: float | None = None
    kl_weight: float = 0.0
    kl_estimator: str = "k2"
    entropy_weight: float = 0.0
    value_weight: float = 0.0
    value_clip: float | None = None

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise ValueError(f"ratio is {self.ratio!r}, expected one of {', '.join(RATIOS)}")
        if self.importance_cap is not None and self.importance_cap <= 0.0:
            raise ValueError(f"importance_cap is {self.importance_cap}, expected more than 0")


def sum_names(settings: LossSettings) -> tuple[str, ...]:
    """What `tree_loss` adds up beside the loss; of each part only where there is one."""
    return (
        SUMS
        + (REFERENCE_SUMS if settings.kl_weight else ())
        + (IMPORTANCE_SUMS if settings.importance_cap is not None else ())
        + (VALUE_SUMS if settings.value_weight else ())
    )


def surrogate(
    ratio: Float[Array, "..."], advantage: Float[Array, "..."], settings: LossSettings
) -> Float[Array, "..."]:
    """PPO's pessimistic surrogate f(r, A) (Schulman et al. 2017), with an optional second bound.

    f = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 and ``dual_clip`` = c is set,
    max(f, c A) (Ye et al. 2020): one token that became far more likely cannot dominate a batch.
    """
    clipped = jnp.clip(ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    value = jnp.minimum(ratio * advantage, clipped * advantage)
    if settings.dual_clip is None:
        return value
    return jnp.where(advantage < 0, jnp.maximum(value, settings.dual_clip * advantage), value)


def kl_estimate(log_ratio: Float[Array, "..."], estimator: str) -> Float[Array, "..."]:
    """Single-sample estimates of the KL from a reference, functions of d = log pi - log ref.

    ========= ================= =============================================================
    estimator value             expected gradient for tokens sampled from the policy
    ========= ================= =============================================================
    k1        d                 zero: the value is for watching, as a loss it does nothing
    k2        d**2 / 2          that of the reverse KL(pi || ref) at fixed visitation
    k3        exp(-d) - 1 + d   that of the forward KL(ref || pi) at fixed visitation
    ========= ================= =============================================================

    (Schulman, "Approximating KL divergence", 2020.) None of them is the gradient of the KL between
    whole trajectories: how often a state is visited is held fixed.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    if estimator == "k3":
        return jnp.exp(jnp.clip(-log_ratio, max=LOG_RATIO_LIMIT)) - 1.0 + log_ratio
    raise ValueError(f"kl estimator {estimator!r}: expected one of {', '.join(KL_ESTIMATORS)}")


def action_means(
    value_bt: Float[Array, "B T"], mask_bt: Bool[Array, "B T"], batch: LossTokens
) -> Float[Array, "B T"]:
    """At every trained token the mean over the tokens of its action; 0 elsewhere.

    The tokens of an action are neighbours in a row, and all of them are trained or none is.
    """

    def before(x_bt: jax.Array) -> jax.Array:
        return jnp.pad(x_bt[:, :-1], ((0, 0), (1, 0)), constant_values=-1)

    same_bt = (batch.action_id == before(batch.action_id)) & (
        batch.tree_id == before(batch.tree_id)
    )
    # Number of the run of equal names a token lies in; what is not trained has runs of its own.
    run_bt = jnp.cumsum(~same_bt, axis=1) - 1
    length = value_bt.shape[1]

    def row(value_t: jax.Array, mask_t: jax.Array, run_t: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(jnp.where(mask_t, value_t, 0.0), run_t, length)
        count = jax.ops.segment_sum(mask_t.astype(value_t.dtype), run_t, length)
        return (total / jnp.maximum(count, 1.0))[run_t]

    return jnp.where(mask_bt, jax.vmap(row)(value_bt, mask_bt, run_bt), 0.0)


def value_loss(
    value: Float[Array, "..."],
    target: Float[Array, "..."],
    prediction: Float[Array, "..."],
    clip: float | None,
) -> Float[Array, "..."]:
    """(V - target)^2 / 2; with a bound c the larger of that and what V cut to prediction +- c has.

    A value that has moved further than c towards its target is not drawn on (Schulman et al. 2017,
    as implemented).
    """
    square = jnp.square(value - target)
    if clip is not None:
        near = prediction + jnp.clip(value - prediction, -clip, clip)
        square = jnp.maximum(square, jnp.square(near - target))
    return 0.5 * square


def tree_loss(
    logprob_bt: Float[Array, "B T"],
    entropy_bt: Float[Array, "B T"],
    batch: LossTokens,
    settings: LossSettings,
    value_bt: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of one micro-batch and the sums its metrics are made of.

    Args:
      logprob_bt: log-prob of token t at its parent, under the policy being trained.
      entropy_bt: entropy of the distribution token t is drawn from.
      batch: a `TreeBatch`; only tokens with ``loss_mask`` count. Where ``importance_cap`` is set
        and ``proximal_logprob`` is None, the policy being trained is still the one before the
        update.
      settings: clip range and weights.
      value_bt: predicted value at token t's parent; needed with ``value_weight``.

    Returns:
      The loss (a sum), and sums over tokens that add up over micro-batches; `finish_metrics` turns
      the total into the logged numbers.
    """
    mask_bt = batch.loss_mask > 0
    weight_bt = jnp.where(mask_bt, batch.coefficient, 0.0)

    def total(value_bt: Float[Array, "B T"]) -> Float[Array, ""]:
        # where, not a product: what padding holds may not be finite.
        return jnp.sum(jnp.where(mask_bt, value_bt, 0.0))

    def count(value_bt: Bool[Array, "B T"]) -> Float[Array, ""]:
        return total(value_bt.astype(logprob_bt.dtype))

    def exp_ratio(log_bt: Float[Array, "B T"]) -> Float[Array, "B T"]:
        if settings.ratio == "action":
            log_bt = action_means(log_bt, mask_bt, batch)
        return jnp.exp(jnp.clip(log_bt, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    # The selection precedes exp, so that no gradient passes through an overflow in a masked token.
    gap_bt = jnp.where(mask_bt, logprob_bt - batch.behaviour_logprob, 0.0)
    extra = {}
    if settings.importance_cap is None:
        ratio_bt = exp_ratio(gap_bt)
        importance_bt = jnp.ones_like(ratio_bt)
    else:
        anchor_bt = batch.proximal_logprob
        anchor_bt = jax.lax.stop_gradient(logprob_bt if anchor_bt is None else anchor_bt)
        ratio_bt = exp_ratio(jnp.where(mask_bt, logprob_bt - anchor_bt, 0.0))
        full_bt = exp_ratio(jnp.where(mask_bt, anchor_bt - batch.behaviour_logprob, 0.0))
        importance_bt = jnp.minimum(full_bt, settings.importance_cap)
        extra["capped"] = count(full_bt > settings.importance_cap)

    surrogate_bt = importance_bt * surrogate(ratio_bt, batch.advantage, settings)
    policy = -total(weight_bt * surrogate_bt)
    entropy = total(weight_bt * entropy_bt)
    loss = policy - settings.entropy_weight * entropy
    if settings.kl_weight:
        drift_bt = jnp.where(mask_bt, logprob_bt - batch.reference_logprob, 0.0)
        kl = total(weight_bt * kl_estimate(drift_bt, settings.kl_estimator))
        loss += settings.kl_weight * kl
        extra |= {"kl": kl, "reference_kl": total(kl_estimate(drift_bt, "k3"))}
    if settings.value_weight:
        value, of_values = _value_terms(value_bt, batch, settings)
        loss += settings.value_weight * value
        extra |= of_values

    above_bt = (batch.advantage > 0) & (ratio_bt > 1.0 + settings.clip_high)
    below_bt = (batch.advantage < 0) & (ratio_bt < 1.0 - settings.clip_low)
    clipped_bt = above_bt | below_bt
    if settings.dual_clip is not None:
        clipped_bt |= (batch.advantage < 0) & (ratio_bt > settings.dual_clip)
    from_behaviour_bt = jnp.exp(jnp.clip(gap_bt, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    used_bt = importance_bt * ratio_bt
    sums = {
        "policy": policy,
        "tokens": count(mask_bt),
        "entropy": total(entropy_bt),
        "clipped": count(clipped_bt),
        "approx_kl": total(from_behaviour_bt - 1.0 - gap_bt),
        "ratio": total(used_bt),
        "ratio_squared": total(jnp.square(used_bt)),
        "gap": total(jnp.abs(gap_bt)),
    }
    return loss, jax.lax.stop_gradient(sums | extra)


def _value_terms(
    value_bt: Float[Array, "B T"] | None, batch: LossTokens, settings: LossSettings
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The critic's loss before its weight, and the sums of its metrics."""
    if value_bt is None or batch.value_target is None:
        raise ValueError("value_weight is set, but there are no values to compare with targets")
    here_bt = batch.value_weight > 0
    weight_bt = jnp.where(here_bt, batch.value_weight, 0.0)
    target_bt = jnp.where(here_bt, batch.value_target, 0.0)
    value_bt = jnp.where(here_bt, value_bt, 0.0)
    old_bt = jnp.where(here_bt, batch.value_prediction, 0.0)
    value = jnp.sum(weight_bt * value_loss(value_bt, target_bt, old_bt, settings.value_clip))
    return value, {
        "value": value,
        "value_weights": jnp.sum(weight_bt),
        "value_residual": jnp.sum(weight_bt * jnp.square(value_bt - target_bt)),
        "value_target": jnp.sum(weight_bt * target_bt),
        "value_target_squared": jnp.sum(weight_bt * jnp.square(target_bt)),
    }


def finish_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Logged numbers from the summed metrics of all micro-batches of an update.

    ``loss/policy``, ``loss/kl`` and ``loss/value`` are the terms of the loss, before their weight.
    ``loss/entropy``, ``diag/clip_fraction``, ``diag/approx_kl`` (E[r - 1 - log r], tokens against
    the behaviour policy), ``diag/reference_kl`` (k3, from the reference), ``rollout/logprob_gap``
    (|learner - rollout|, nats) and ``diag/importance_capped`` are means over trained tokens.
    ``diag/ess`` is the effective sample size of what advantages are multiplied with, as a fraction,
    (sum u r)^2 / (n sum (u r)^2). ``diag/value_explained`` is 1 - E(V - target)^2 / Var(target), 1
    for a perfect critic. What a part of the loss would measure is left out where the part is.
    """
    value = {name: float(x) for name, x in sums.items()}
    count = max(value["tokens"], 1.0)
    extra = {}
    if "kl" in value:
        extra["loss/kl"] = value["kl"]
        extra["diag/reference_kl"] = value["reference_kl"] / count
    if "capped" in value:
        extra["diag/importance_capped"] = value["capped"] / count
    if "value" in value:
        weights = max(value["value_weights"], 1e-30)
        mean = value["value_target"] / weights
        spread = value["value_target_squared"] / weights - mean**2
        extra["loss/value"] = value["value"]
        extra["diag/value_explained"] = 1.0 - value["value_residual"] / weights / max(spread, 1e-30)
    return {
        "loss/policy": value["policy"],
        "loss/entropy": value["entropy"] / count,
        "rollout/logprob_gap": value["gap"] / count,
        "diag/clip_fraction": value["clipped"] / count,
        "diag/approx_kl": value["approx_kl"] / count,
        "diag/ess": value["ratio"] ** 2 / max(count * value["ratio_squared"], 1e-30),
        **extra,
    }
