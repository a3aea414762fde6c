"""The one loss of every algorithm: clipped policy gradient, KL and entropy at node level.

A token of the tree is in the batch once, so it has one behaviour log-prob, one ratio, one
advantage and one coefficient. With q the token's coefficient (flow weight over the constants P and
C, both the same in every minibatch), A its advantage, r = pi(a|s) / behaviour(a|s), H the entropy
of pi(.|s), and all sums over sampled tokens:

  L = - sum q f(r, A)  +  kl_weight sum q k(a|s)  -  entropy_weight sum q H

Everything is a sum, never a mean: the losses and gradients of micro-batches add up to those of the
whole batch exactly. All log-probs are of the distribution at the sampling temperature.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before exp; far outside every clip range, and exp(20)**2 is finite."""

KL_ESTIMATORS = ("k1", "k2", "k3")

SUMS = (
    "policy", "tokens", "entropy", "clipped", "approx_kl", "ratio", "ratio_squared", "gap",
)  # fmt: skip
REFERENCE_SUMS = ("kl", "reference_kl")


class LossTokens(Protocol):
    """The fields of a `bpo_jax.packing.TreeBatch` the loss reads, all [B, T] float32."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What is added up, and with which weight.

    Attributes:
      clip_low: the ratio is clipped below at 1 - clip_low.
      clip_high: and above at 1 + clip_high.
      dual_clip: where the advantage A is negative, f is at least ``dual_clip * A``; None for no
        bound.
      kl_weight: weight of the KL to the reference policy; 0 leaves the reference out altogether.
      kl_estimator: "k1", "k2" or "k3", see `kl_estimate`.
      entropy_weight: weight of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_weight: float = 0.0
    kl_estimator: str = "k2"
    entropy_weight: float = 0.0


def sum_names(settings: LossSettings) -> tuple[str, ...]:
    """What `tree_loss` adds up beside the loss; the reference only where there is one."""
    return SUMS + REFERENCE_SUMS if settings.kl_weight else SUMS


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


def tree_loss(
    logprob_bt: Float[Array, "B T"],
    entropy_bt: Float[Array, "B T"],
    batch: LossTokens,
    settings: LossSettings,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of one micro-batch and the sums its metrics are made of.

    Args:
      logprob_bt: log-prob of token t at its parent, under the policy being trained.
      entropy_bt: entropy of the distribution token t is drawn from.
      batch: a `TreeBatch`; only tokens with ``loss_mask`` count.
      settings: clip range and weights.

    Returns:
      The loss (a sum), and sums over tokens that add up over micro-batches; `finish_metrics` turns
      the total into the logged numbers.
    """
    mask_bt = batch.loss_mask > 0
    weight_bt = jnp.where(mask_bt, batch.coefficient, 0.0)

    def total(value_bt: Float[Array, "B T"]) -> Float[Array, ""]:
        # where, not a product: what padding holds may not be finite.
        return jnp.sum(jnp.where(mask_bt, value_bt, 0.0))

    # The selection precedes exp, so that no gradient passes through an overflow in a masked token.
    gap_bt = jnp.where(mask_bt, logprob_bt - batch.behaviour_logprob, 0.0)
    ratio_bt = jnp.exp(jnp.clip(gap_bt, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    policy = -total(weight_bt * surrogate(ratio_bt, batch.advantage, settings))
    entropy = total(weight_bt * entropy_bt)
    loss = policy - settings.entropy_weight * entropy
    reference = {}
    if settings.kl_weight:
        drift_bt = jnp.where(mask_bt, logprob_bt - batch.reference_logprob, 0.0)
        kl = total(weight_bt * kl_estimate(drift_bt, settings.kl_estimator))
        loss += settings.kl_weight * kl
        reference = {"kl": kl, "reference_kl": total(kl_estimate(drift_bt, "k3"))}

    above_bt = (batch.advantage > 0) & (ratio_bt > 1.0 + settings.clip_high)
    below_bt = (batch.advantage < 0) & (ratio_bt < 1.0 - settings.clip_low)
    clipped_bt = above_bt | below_bt
    if settings.dual_clip is not None:
        clipped_bt |= (batch.advantage < 0) & (ratio_bt > settings.dual_clip)
    sums = {
        "policy": policy,
        "tokens": jnp.sum(mask_bt.astype(policy.dtype)),
        "entropy": total(entropy_bt),
        "clipped": total(clipped_bt.astype(policy.dtype)),
        "approx_kl": total(ratio_bt - 1.0 - gap_bt),
        "ratio": total(ratio_bt),
        "ratio_squared": total(jnp.square(ratio_bt)),
        "gap": total(jnp.abs(gap_bt)),
    }
    return loss, jax.lax.stop_gradient(sums | reference)


def finish_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Logged numbers from the summed metrics of all micro-batches of an update.

    ``loss/policy`` and ``loss/kl`` are the terms of the loss, before their weight.
    ``loss/entropy``, ``diag/clip_fraction``, ``diag/approx_kl`` (E[r - 1 - log r], from the
    behaviour policy), ``diag/reference_kl`` (k3, from the reference) and ``rollout/logprob_gap``
    (|learner - rollout|, nats) are means over trained tokens. ``diag/ess`` is the effective sample
    size of the ratios as a fraction, (sum r)^2 / (n sum r^2). Without a reference there is no
    ``loss/kl`` and no ``diag/reference_kl``.
    """
    value = {name: float(x) for name, x in sums.items()}
    count = max(value["tokens"], 1.0)
    reference = {}
    if "kl" in value:
        reference["loss/kl"] = value["kl"]
        reference["diag/reference_kl"] = value["reference_kl"] / count
    return {
        "loss/policy": value["policy"],
        "loss/entropy": value["entropy"] / count,
        "rollout/logprob_gap": value["gap"] / count,
        "diag/clip_fraction": value["clipped"] / count,
        "diag/approx_kl": value["approx_kl"] / count,
        "diag/ess": value["ratio"] ** 2 / max(count * value["ratio_squared"], 1e-30),
        **reference,
    }
