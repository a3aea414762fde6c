"""Drawing a token from logits, on the device.

A token is drawn with one uniform number; its log-probability and entropy come with it.

A policy is trained at the temperature it is sampled at, so the log-probability and the entropy that
come back are those of ``softmax(logits / temperature)``; with truncation by top-k or top-p they are
those of the truncated distribution, and the log-probability without truncation comes beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32


class Heat(NamedTuple):
    """How logits become a distribution; plain numbers, which may change without a compilation.

    Attributes:
      temperature: 0 is greedy.
      top_k: only the k most probable tokens are sampled; 0: all.
      top_p: of these only the fewest that hold at least this probability together; 1: all.
    """

    temperature: Float[Array, ""] | np.float32
    top_k: Int[Array, ""] | np.int32 = np.int32(0)
    top_p: Float[Array, ""] | np.float32 = np.float32(1.0)


class Choice(NamedTuple):
    """A token for every row, with its log-probability, the entropy, and the raw log-probability."""

    token_b: jax.Array
    logprob_b: jax.Array
    entropy_b: jax.Array
    raw_logprob_b: jax.Array


def choose(
    hidden_bd: Float[Array, "b d"],
    head_dv: Float[Array, "d v"],
    heat: Heat,
    uniform_b: Float[Array, "b"],
) -> Choice:
    """Draws a token for every row from the distribution of what follows `hidden_bd`."""
    raw_bv, raw_entropy_b = log_softmax(logits(hidden_bd, head_dv), heat.temperature)

    def truncated():
        kept_bv = truncate(raw_bv, heat)
        logp_bv = jnp.where(kept_bv, raw_bv, -jnp.inf)
        logp_bv = logp_bv - jax.nn.logsumexp(logp_bv, axis=-1, keepdims=True)
        return logp_bv, entropy(logp_bv)

    whole = (heat.top_k <= 0) & (heat.top_p >= 1.0)
    logp_bv, entropy_b = jax.lax.cond(whole, lambda: (raw_bv, raw_entropy_b), truncated)
    token_b = draw(logp_bv, uniform_b)

    def of_token(x_bv):
        return jnp.take_along_axis(x_bv, token_b[:, None], axis=1)[:, 0]

    return Choice(token_b, of_token(logp_bv), entropy_b, of_token(raw_bv))


def next_entropy(
    hidden_bd: Float[Array, "b d"], head_dv: Float[Array, "d v"], heat: Heat
) -> Float[Array, "b"]:
    """Entropy of ``softmax(logits / temperature)``, whatever is truncated."""
    return log_softmax(logits(hidden_bd, head_dv), heat.temperature)[1]


def logits(hidden_bd: Float[Array, "b d"], head_dv: Float[Array, "d v"]) -> Float[Array, "b v"]:
    """Logits in float32."""
    return jnp.einsum(
        "bd,dv->bv", hidden_bd, head_dv.astype(hidden_bd.dtype), preferred_element_type=jnp.float32
    )


def log_softmax(
    logits_bv: Float[Array, "b v"], temperature: Float[Array, ""] | np.float32
) -> tuple[Float[Array, "b v"], Float[Array, "b"]]:
    """Log-probabilities and entropy (nats) of ``softmax(logits / temperature)``.

    At temperature 0 both describe the greedy choice: log-probability 0 for the largest logit (the
    first of equals), -inf for the others, entropy 0.
    """
    logits_bv = logits_bv.astype(jnp.float32)
    greedy = temperature <= 0
    logp_bv = jax.nn.log_softmax(logits_bv / jnp.where(greedy, 1.0, temperature), axis=-1)
    entropy_b = entropy(logp_bv)
    best_b = jnp.argmax(logits_bv, axis=-1)
    chosen_bv = jnp.arange(logits_bv.shape[-1]) == best_b[:, None]
    logp_bv = jnp.where(greedy, jnp.where(chosen_bv, 0.0, -jnp.inf), logp_bv)
    return logp_bv, jnp.where(greedy, 0.0 * entropy_b, entropy_b)


def entropy(logp_bv: Float[Array, "b v"]) -> Float[Array, "b"]:
    """-sum p log p in nats."""
    p_bv = jnp.exp(logp_bv)
    # A log-probability may be -inf; p log p is 0 there. What is not a number stays so.
    return jnp.maximum(-jnp.sum(jnp.where(p_bv == 0, 0.0, p_bv * logp_bv), axis=-1), 0.0)


def truncate(logp_bv: Float[Array, "b v"], heat: Heat) -> Bool[Array, "b v"]:
    """Which tokens top-k, and then top-p of what top-k leaves, keep.

    Of equally probable tokens either all are kept or none, so that a few more than k may be. The
    most probable token is always kept.
    """
    v = logp_bv.shape[-1]
    sorted_bv = jnp.sort(logp_bv, axis=-1, descending=True)
    k = jnp.where(heat.top_k > 0, jnp.minimum(heat.top_k, v), v)
    mass_bv = jnp.where(jnp.arange(v) < k, jnp.exp(sorted_bv), 0.0)
    before_bv = jnp.cumsum(mass_bv, axis=-1) - mass_bv
    enough_b1 = heat.top_p * mass_bv.sum(-1, keepdims=True)
    count_b = jnp.sum((before_bv < enough_b1) & (jnp.arange(v) < k), axis=-1)
    least_b1 = jnp.take_along_axis(sorted_bv, jnp.maximum(count_b - 1, 0)[:, None], axis=1)
    return logp_bv >= least_b1


def uniforms(key_b2: UInt32[Array, "b 2"], position_b: Int[Array, "b"]) -> Float[Array, "b"]:
    """One number in [0, 1) per row, a function of the row's key and of its position only."""

    def draw(words_2, position):
        key = jax.random.wrap_key_data(words_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(draw)(key_b2, position_b)


def draw(logp_bv: Float[Array, "b v"], uniform_b: Float[Array, "b"]) -> Int[Array, "b"]:
    """Inverts the cumulative distribution in two levels, about 2 sqrt(V) additions deep per row.

    The vocabulary is cut into blocks: first the block in which ``u`` falls, then the token inside.
    A token of probability 0 is never drawn.
    """
    b, v = logp_bv.shape
    block = 1 << ((v - 1).bit_length() + 1) // 2
    p_bv = jnp.exp(logp_bv)
    p_bnk = jnp.pad(p_bv, ((0, 0), (0, -v % block))).reshape(b, -1, block)
    mass_bn = p_bnk.sum(-1)
    target_b = uniform_b * mass_bn.sum(-1)
    block_b, before_b = _locate(mass_bn, target_b)
    inside_bk = jnp.take_along_axis(p_bnk, block_b[:, None, None], axis=1)[:, 0]
    inner_b, _ = _locate(inside_bk, target_b - before_b)
    return (block_b * block + inner_b).astype(jnp.int32)


def _locate(mass_bn: jax.Array, target_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first bin whose cumulative mass exceeds the target, and the mass before that bin.

    Rounding can leave the target at or above the total; the last bin that has mass is taken then.
    """
    cumulative_bn = jnp.cumsum(mass_bn, axis=-1)
    found_b = jnp.sum(cumulative_bn <= target_b[:, None], axis=-1)
    last_b = mass_bn.shape[-1] - 1 - jnp.argmax(mass_bn[:, ::-1] > 0, axis=-1)
    found_b = jnp.minimum(found_b, last_b)
    upto_b = jnp.take_along_axis(cumulative_bn, found_b[:, None], axis=-1)[:, 0]
    own_b = jnp.take_along_axis(mass_bn, found_b[:, None], axis=-1)[:, 0]
    return found_b, upto_b - own_b
