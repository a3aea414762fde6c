"""Tree attention in blocks with XLA alone: only blocks in which a query sees a key are computed.

The pairs of blocks that matter are listed first; one loop of as many steps goes through them, so a
block pair that is skipped costs nothing at all. Scores of one pair live at a time. The forward pass
keeps a running softmax (Milakov and Gimelshein 2018); the backward pass recomputes the weights from
the saved log-normaliser, as in FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_FLOOR = -1e30
"""Stands for minus infinity without making nan of a difference."""


def attend(
    q_bthd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    subtree_end_bt: jax.Array,
    *,
    block: int,
) -> jax.Array:
    """See `bpo_jax.models.tree_attention.tree_attention`."""
    b, t, h, d = q_bthd.shape
    kv = k_btkd.shape[2]
    block = min(block, t)
    missing = -t % block

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))

    # Heads in front of tokens: a block is then a stack of matrices. The end of a padded token is 0,
    # before the token itself, so that nothing sees it.
    q_bktgd = jnp.moveaxis(pad(q_bthd).reshape(b, t + missing, kv, h // kv, d), 2, 1)
    k_bktd, v_bktd = (jnp.moveaxis(pad(x), 2, 1) for x in (k_btkd, v_btkd))
    out_bktgd = _attend(block, q_bktgd * d**-0.5, k_bktd, v_bktd, pad(subtree_end_bt))
    return jnp.moveaxis(out_bktgd, 1, 2)[:, :t].reshape(b, t, h, d)


def live_pairs(subtree_end_bt: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Lists the block pairs in which some query sees some key.

    Returns:
      int32 [capacity, 3] of (row, query block, key block), those of one query block together, and
      how many of them are real.
    """
    b, t = subtree_end_bt.shape
    n = t // block
    index = jnp.arange(t, dtype=subtree_end_bt.dtype)
    reach_bt = jnp.where(subtree_end_bt > index, subtree_end_bt, 0)
    reach_bn = jnp.max(reach_bt.reshape(b, n, block), axis=-1)
    number = jnp.arange(n, dtype=subtree_end_bt.dtype)
    live_bqk = (number <= number[:, None]) & (reach_bn[:, None, :] > number[:, None] * block)
    capacity = b * n * (n + 1) // 2
    pairs = jnp.stack(jnp.nonzero(live_bqk, size=capacity, fill_value=0), axis=-1)
    return pairs.astype(jnp.int32), jnp.sum(live_bqk, dtype=jnp.int32)


def _take(x: jax.Array, row: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """Rows [start, start + block) of the token axis of one batch row: [k, block, ...]."""
    at = (row, 0, start) + (0,) * (x.ndim - 3)
    return jax.lax.dynamic_slice(x, at, (1, x.shape[1], block, *x.shape[3:]))[0]


def _put(x: jax.Array, new: jax.Array, row: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, new[None], (row, 0, start) + (0,) * (x.ndim - 3))


def _seen(end_bt: jax.Array, row: jax.Array, q_at: jax.Array, k_at: jax.Array, block: int):
    """Which key of a block each query of another sees: bool [1, block, 1, block]."""
    end_k = jax.lax.dynamic_slice(end_bt, (row, k_at), (1, block))[0]
    i = q_at + jnp.arange(block)[:, None]
    j = k_at + jnp.arange(block)
    return ((j <= i) & (i < end_k))[None, :, None, :]


def _matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(spec, x, y, preferred_element_type=accumulate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(block, q_bktgd, k_bktd, v_bktd, end_bt):
    return _forward(block, q_bktgd, k_bktd, v_bktd, end_bt)[0]


def _forward(block, q_bktgd, k_bktd, v_bktd, end_bt):
    pairs, count = live_pairs(end_bt, block)
    accumulate = jnp.promote_types(q_bktgd.dtype, jnp.float32)

    def step(n, state):
        top, total, out = state
        row, q_at, k_at = pairs[n, 0], pairs[n, 1] * block, pairs[n, 2] * block
        q, top_q, total_q, out_q = (_take(x, row, q_at, block) for x in (q_bktgd, *state))
        k, v = (_take(x, row, k_at, block) for x in (k_bktd, v_bktd))
        seen = _seen(end_bt, row, q_at, k_at, block)
        scores = jnp.where(seen, _matmul("kigd,kjd->kigj", q, k), _FLOOR)
        new_top = jnp.maximum(top_q, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        keep = jnp.exp(top_q - new_top)
        total_q = total_q * keep + jnp.sum(weights, axis=-1)
        out_q = out_q * keep[..., None] + _matmul("kigj,kjd->kigd", weights.astype(v.dtype), v)
        return (
            _put(top, new_top, row, q_at),
            _put(total, total_q, row, q_at),
            _put(out, out_q, row, q_at),
        )

    per_query = q_bktgd.shape[:-1]
    start = (
        jnp.full(per_query, _FLOOR, accumulate),
        jnp.zeros(per_query, accumulate),
        jnp.zeros(q_bktgd.shape, accumulate),
    )
    top, total, out = jax.lax.fori_loop(0, count, step, start)
    total = jnp.where(total > 0, total, 1.0)  # a query that sees nothing keeps its output of 0
    out = (out / total[..., None]).astype(q_bktgd.dtype)
    return out, (q_bktgd, k_bktd, v_bktd, end_bt, out, top + jnp.log(total))


def _backward(block, saved, d_out):
    q_bktgd, k_bktd, v_bktd, end_bt, out, logz = saved
    pairs, count = live_pairs(end_bt, block)
    accumulate = jnp.promote_types(q_bktgd.dtype, jnp.float32)
    # sum_j p_ij dp_ij, without the p: it is the product of the output and its cotangent.
    delta = jnp.sum(out.astype(accumulate) * d_out.astype(accumulate), axis=-1)

    def step(n, state):
        d_q, d_k, d_v = state
        row, q_at, k_at = pairs[n, 0], pairs[n, 1] * block, pairs[n, 2] * block
        q, d_o, logz_q, delta_q, d_q_here = (
            _take(x, row, q_at, block) for x in (q_bktgd, d_out, logz, delta, d_q)
        )
        k, v, d_k_here, d_v_here = (_take(x, row, k_at, block) for x in (k_bktd, v_bktd, d_k, d_v))
        seen = _seen(end_bt, row, q_at, k_at, block)
        scores = _matmul("kigd,kjd->kigj", q, k)
        weights = jnp.where(seen, jnp.exp(scores - logz_q[..., None]), 0.0)
        d_weights = _matmul("kigd,kjd->kigj", d_o, v)
        d_scores = (weights * (d_weights - delta_q[..., None])).astype(q.dtype)
        weights = weights.astype(q.dtype)
        return (
            _put(d_q, d_q_here + _matmul("kigj,kjd->kigd", d_scores, k), row, q_at),
            _put(d_k, d_k_here + _matmul("kigj,kigd->kjd", d_scores, q), row, k_at),
            _put(d_v, d_v_here + _matmul("kigj,kigd->kjd", weights, d_o), row, k_at),
        )

    start = tuple(jnp.zeros(x.shape, accumulate) for x in (q_bktgd, k_bktd, v_bktd))
    grads = jax.lax.fori_loop(0, count, step, start)
    return (*(g.astype(q_bktgd.dtype) for g in grads), None)


_attend.defvjp(_forward, _backward)
