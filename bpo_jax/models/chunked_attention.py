"""Tree attention in blocks with XLA alone: only blocks in which a query sees a key are computed.

The key blocks that each query block needs are listed first, and a loop of just as many steps goes
through them, so a skipped pair of blocks costs nothing at all. The scores of one pair live at a
time. The forward pass keeps a running softmax (Milakov and Gimelshein 2018); the backward pass
computes the weights again from the saved log-normaliser, as in FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bpo_jax.models import visibility
from bpo_jax.models.remat import ATTENTION_RESULTS

BLOCK_Q, BLOCK_K = 128, 256
"""Where scores of a block pair and its inputs stay in a CPU core's cache, measured for heads of 64;
queries of a group share a block, so it is the smaller of the two."""

_FLOOR = -1e30
"""Stands for minus infinity without making nan of a difference."""

Layout = tuple[int, int, int]
"""Query heads of a key head, queries of a block, keys of a block."""


def attend(
    q_bshd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    query_index_bs: jax.Array,
    subtree_end_bt: jax.Array,
    *,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
) -> jax.Array:
    """See `bpo_jax.models.tree_attention.tree_attention`."""
    b, s, h, d = q_bshd.shape
    t, kv = k_btkd.shape[1:3]
    group = h // kv
    block_q, block_k = min(block_q, s), min(block_k, t)
    rows, columns = s + -s % block_q, t + -t % block_k

    def keys(x_btkd: jax.Array) -> jax.Array:
        x = _pad(x_btkd, columns).reshape(b, columns // block_k, block_k, kv, d)
        return jnp.swapaxes(x, 2, 3)

    # A block is a stack of matrices, one a key head, with the queries of its group side by side.
    q = _pad(q_bshd * d**-0.5, rows).reshape(b, rows // block_q, block_q, kv, group, d)
    q = q.transpose(0, 1, 3, 4, 2, 5).reshape(b, -1, kv, group * block_q, d)
    # A padding query sees nothing; a padding key ends before it begins, so that nothing sees it.
    index = _pad(query_index_bs, rows, fill=-1)
    end = _pad(subtree_end_bt, columns)
    out = _attend((group, block_q, block_k), q, keys(k_btkd), keys(v_btkd), index, end)
    out = out.reshape(b, -1, kv, group, block_q, d).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(b, rows, h, d)[:, :s]


def _pad(x: jax.Array, length: int, fill: int = 0) -> jax.Array:
    widths = ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)


def live_list(
    query_index_bs: jax.Array, subtree_end_bt: jax.Array, *, block_q: int, block_k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The key blocks that each query block needs.

    Returns:
      int32 [b, nq, nk], for each query block the key blocks it sees whole, then the others it
      needs, then the rest, each in order; and twice int32 [b, nq], how many it sees whole and how
      many it needs.
    """
    sizes = {"block_q": block_q, "block_k": block_k}
    live = visibility.live_blocks(query_index_bs, subtree_end_bt, **sizes)
    whole = visibility.whole_blocks(query_index_bs, subtree_end_bt, **sizes)
    rank = jnp.where(whole, 0, jnp.where(live, 1, 2))
    order = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
    whole_bn, live_bn = (jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (whole, live))
    return order, whole_bn, live_bn


def _matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(spec, x, y, preferred_element_type=accumulate)


def _for_live_blocks(
    layout: Layout, index_bs: jax.Array, end_bt: jax.Array, carry: Any, outer: Callable[..., Any]
) -> tuple[Any, Any]:
    """Visits all query blocks, and for each the key blocks it needs.

    Args:
      layout: of the blocks.
      index_bs: indices of the queries.
      end_bt: ends of the keys' subtrees.
      carry: handed from one query block to the next.
      outer: (carry, row, query block, visit) -> (carry, result), where ``visit(step, state)``
        calls ``step(state, row, key block, mask)`` for each needed key block. The mask is added to
        scores [group * block_q, block_k]; it is 0 where the whole block is seen.

    Returns:
      The last carry, and the results stacked [b, query blocks, ...].
    """
    group, block_q, block_k = layout
    order, whole, count = live_list(index_bs, end_bt, block_q=block_q, block_k=block_k)
    b, blocks = count.shape
    index = index_bs.reshape(b, blocks, block_q)
    end = end_bt.reshape(b, -1, block_k)

    def one(carry: Any, number: jax.Array) -> tuple[Any, Any]:
        row, at = number // blocks, number % blocks

        def visit(step: Callable[..., Any], state: Any) -> Any:
            def unmasked(n: jax.Array, state: Any) -> Any:
                return step(state, row, order[row, at, n], 0.0)

            def masked(n: jax.Array, state: Any) -> Any:
                block = order[row, at, n]
                key = block * block_k + jnp.arange(block_k)
                seen = visibility.visible(index[row, at][:, None], key, end[row, block])
                # One mask for all heads; the queries of a group repeat it.
                mask = jnp.tile(jnp.where(seen, 0.0, _FLOOR), (group, 1))
                return step(state, row, block, mask)

            # Most of a tree is seen whole: its trunk by everything above, without a mask.
            state = jax.lax.fori_loop(0, whole[row, at], unmasked, state)
            return jax.lax.fori_loop(whole[row, at], count[row, at], masked, state)

        return outer(carry, row, at, visit)

    carry, results = jax.lax.scan(one, carry, jnp.arange(b * blocks))
    return carry, jax.tree.map(lambda x: x.reshape(b, blocks, *x.shape[1:]), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(layout, q, k, v, index_bs, end_bt):
    return _forward(layout, q, k, v, index_bs, end_bt)[0]


def _forward(layout, q, k, v, index_bs, end_bt):
    heads, queries, d = q.shape[2:]
    accumulate = jnp.promote_types(q.dtype, jnp.float32)

    def head(state, q, k, v, mask):
        top, total, out = state
        scores = _matmul("id,jd->ij", q, k) + mask
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[:, None])
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(weights, axis=-1)
        out = out * keep[:, None] + _matmul("ij,jd->id", weights.astype(v.dtype), v)
        return new_top, total, out

    def block(carry, row, at, visit):
        def step(state, row, block, mask):
            # One head after the other, by name: XLA runs the products of a batch on one core, and
            # independent ones side by side.
            return tuple(
                head(state[n], q[row, at, n], k[row, block, n], v[row, block, n], mask)
                for n in range(heads)
            )

        start = (
            jnp.full((queries,), _FLOOR, accumulate),
            jnp.zeros((queries,), accumulate),
            jnp.zeros((queries, d), accumulate),
        )
        top, total, out = map(jnp.stack, zip(*visit(step, (start,) * heads), strict=True))
        # A query that has seen nothing but masked keys, or no block at all, gives 0.
        blind = top <= _FLOOR / 2
        total = jnp.where(blind, 1.0, total)
        out = jnp.where(blind[..., None], 0.0, out / total[..., None])
        # With this normaliser its weights are 0 in the backward pass, too.
        logz = jnp.where(blind, -_FLOOR, top + jnp.log(total))
        return carry, (out.astype(q.dtype), logz)

    _, (out, logz) = _for_live_blocks(layout, index_bs, end_bt, (), block)
    out, logz = (checkpoint_name(x, ATTENTION_RESULTS) for x in (out, logz))
    return out, (q, k, v, index_bs, end_bt, out, logz)


def _backward(layout, saved, d_out):
    q, k, v, index_bs, end_bt, out, logz = saved
    heads = q.shape[2]
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    # sum_j p_ij dp_ij, without the p: it is the product of the output and its cotangent.
    delta = _matmul("bnhid,bnhid->bnhi", out, d_out)

    def head(d_q, q, k, v, mask, d_out, logz, delta):
        weights = jnp.exp(_matmul("id,jd->ij", q, k) + mask - logz[:, None])
        d_weights = _matmul("id,jd->ij", d_out, v)
        d_scores = (weights * (d_weights - delta[:, None])).astype(q.dtype)
        d_v = _matmul("ij,id->jd", weights.astype(q.dtype), d_out)
        d_k = _matmul("ij,id->jd", d_scores, q)
        return d_q + _matmul("ij,jd->id", d_scores, k), d_k, d_v

    def block(carry, row, at, visit):
        def step(state, row, block, mask):
            d_q, d_k, d_v = state
            d_q, d_k_here, d_v_here = zip(
                *(
                    head(
                        d_q[n], q[row, at, n], k[row, block, n], v[row, block, n], mask,
                        d_out[row, at, n], logz[row, at, n], delta[row, at, n],
                    )
                    for n in range(heads)
                ),
                strict=True,
            )  # fmt: skip
            d_k = d_k.at[row, block].add(jnp.stack(d_k_here))
            d_v = d_v.at[row, block].add(jnp.stack(d_v_here))
            return d_q, d_k, d_v

        zero = jnp.zeros(q.shape[3:], accumulate)
        d_q, d_k, d_v = visit(step, ((zero,) * heads, *carry))
        return (d_k, d_v), jnp.stack(d_q).astype(q.dtype)

    start = (jnp.zeros(k.shape, accumulate), jnp.zeros(v.shape, accumulate))
    (d_k, d_v), d_q = _for_live_blocks(layout, index_bs, end_bt, start, block)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)
