"""The compiled half of the engine: computing what was read, and sampling what is said.

A token is drawn with one uniform number; its log-probability and entropy come with it.

A policy is trained at the temperature it is sampled at, so the log-probability and the entropy that
come back are those of ``softmax(logits / temperature)``, without truncation of any kind.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from bpo_jax.models.decoder import Decoder
from bpo_jax.rollout.kv_cache import Rows


class Sampled(NamedTuple):
    """What `sample_turns` made.

    Attributes:
      counts: int32 [b], tokens made in each row; what lies beyond them in a row means nothing.
      ids: int32 [b, width].
      logprobs: float32 [b, width].
      entropies: float32 [b, width].
    """

    counts: jax.Array
    ids: jax.Array
    logprobs: jax.Array
    entropies: jax.Array


def prefill_chunk(
    model: Decoder,
    rows: Rows,
    tokens_bs: Int[Array, "b s"],
    start_b: Int[Array, "b"],
    count_b: Int[Array, "b"],
    temperature: Float[Array, ""],
) -> tuple[Rows, Float[Array, "b"]]:
    """Appends up to s tokens to every row.

    Args:
      tokens_bs: right-padded; row b holds ``count_b[b]`` tokens, none where it sits out.
      start_b: tokens already in each row.

    Returns:
      The rows, and the entropy of the next token's distribution in each.
    """
    hidden_bsd, layers = model.decode(tokens_bs, start_b, rows.layers)
    last_b = jnp.maximum(count_b - 1, 0)
    last_bd = jnp.take_along_axis(hidden_bsd, last_b[:, None, None], axis=1)[:, 0]
    hidden_bd = jnp.where(count_b[:, None] > 0, last_bd, rows.hidden)
    _, entropy_b = log_softmax(_logits(hidden_bd, model.head_dv()), temperature)
    return Rows(layers=layers, hidden=hidden_bd), entropy_b


def sample_turns(
    model: Decoder,
    rows: Rows,
    start_b: Int[Array, "b"],
    limit_b: Int[Array, "b"],
    key_b2: UInt32[Array, "b 2"],
    temperature: Float[Array, ""],
    enough: Int[Array, ""],
    *,
    stop_id: int,
    width: int,
) -> tuple[Rows, Sampled]:
    """Samples until at most `enough` rows have met neither the stop token nor their limit.

    Every sampled token is appended to the cache, save the last ones when no row goes on.

    Args:
      start_b: tokens already in each row.
      limit_b: the most tokens to sample in each row, at most `width`; 0 where it sits out.
      key_b2: of each row, see `uniforms`.
      enough: rows that may be left unfinished.
    """
    head_dv, blocks = model.head_dv(), model.blocks()
    b = start_b.shape[0]

    def body(carry):
        step, rows, live_b, made = carry
        logp_bv, entropy_b = log_softmax(_logits(rows.hidden, head_dv), temperature)
        position_b = start_b + step
        token_b = draw(logp_bv, uniforms(key_b2, position_b))
        logp_b = jnp.take_along_axis(logp_bv, token_b[:, None], axis=1)[:, 0]

        def record(column_bt, new_b):
            return jax.lax.dynamic_update_slice(column_bt, new_b[:, None], (0, step))

        made = Sampled(
            counts=made.counts + live_b,
            ids=record(made.ids, token_b),
            logprobs=record(made.logprobs, logp_b),
            entropies=record(made.entropies, entropy_b),
        )
        live_b = live_b & (token_b != stop_id) & (made.counts < limit_b)

        def advance(rows):
            hidden_bsd, layers = model.decode(token_b[:, None], position_b, rows.layers, blocks)
            # A row that sits out keeps the state from which it will be sampled.
            hidden_bd = jnp.where(live_b[:, None], hidden_bsd[:, 0], rows.hidden)
            return Rows(layers=layers, hidden=hidden_bd)

        # The last token of a turn is computed with what follows it.
        rows = jax.lax.cond(jnp.any(live_b), advance, lambda rows: rows, rows)
        return step + 1, rows, live_b, made

    none = Sampled(
        counts=jnp.zeros(b, jnp.int32),
        ids=jnp.zeros((b, width), jnp.int32),
        logprobs=jnp.zeros((b, width), jnp.float32),
        entropies=jnp.zeros((b, width), jnp.float32),
    )
    start = (jnp.int32(0), rows, limit_b > 0, none)
    _, rows, _, made = jax.lax.while_loop(lambda carry: jnp.sum(carry[2]) > enough, body, start)
    return rows, made


def _logits(hidden_bd: jax.Array, head_dv: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bd,dv->bv", hidden_bd, head_dv.astype(hidden_bd.dtype), preferred_element_type=jnp.float32
    )


def log_softmax(
    logits_bv: Float[Array, "b v"], temperature: Float[Array, ""]
) -> tuple[Float[Array, "b v"], Float[Array, "b"]]:
    """Log-probabilities and entropy (nats) of ``softmax(logits / temperature)``.

    At temperature 0 both describe the greedy choice: log-probability 0 for the largest logit (the
    first of equals), -inf for the others, entropy 0.
    """
    logits_bv = logits_bv.astype(jnp.float32)
    greedy = temperature <= 0
    logp_bv = jax.nn.log_softmax(logits_bv / jnp.where(greedy, 1.0, temperature), axis=-1)
    p_bv = jnp.exp(logp_bv)
    # A log-probability may underflow to -inf; p log p is 0 there.
    entropy_b = -jnp.sum(jnp.where(p_bv > 0, p_bv * logp_bv, 0.0), axis=-1)
    best_b = jnp.argmax(logits_bv, axis=-1)
    chosen_bv = jnp.arange(logits_bv.shape[-1]) == best_b[:, None]
    logp_bv = jnp.where(greedy, jnp.where(chosen_bv, 0.0, -jnp.inf), logp_bv)
    return logp_bv, jnp.where(greedy, 0.0, jnp.maximum(entropy_b, 0.0))


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
