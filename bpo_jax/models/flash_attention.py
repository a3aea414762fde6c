"""Tree attention as Pallas TPU kernels, forward and backward.

FlashAttention (Dao et al. 2022): the scores of one pair of blocks live at a time, the forward pass
keeps a running softmax and saves its log-normaliser, the backward pass computes the weights again.

Which pairs of blocks are needed depends on the trees, so they are listed first, and the grid is a
walk along the list (`bpo_jax.models.live_pairs`): a pair in which nothing is seen has no step, is
not fetched and costs nothing. (Splash attention in JAX prefetches its blocks by such lists too.)
Forward and query gradient walk query block by query block, the gradient of keys and values key
block by key block; what a block gathers stays on the chip until its last pair.

Which token sees which is `bpo_jax.models.visibility.visible` inside the kernels too. Blocks that
nothing is listed for are never written, so their content is replaced by zeros outside.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bpo_jax.models import visibility
from bpo_jax.models.live_pairs import Pairs
from bpo_jax.models.remat import ATTENTION_RESULTS

BLOCK_Q, BLOCK_K = 512, 512

LIST_LIMIT = 2**17
"""Pairs of blocks that one call may list: 512 KiB, half the scalar memory of a core from v4 on."""

_LANES = 128
_FLOOR = -1e30
"""Stands for minus infinity without making nan of a difference."""


def attend(
    q_bshd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    query_index_bs: jax.Array,
    subtree_end_bt: jax.Array,
    *,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
    interpret: bool = False,
) -> jax.Array:
    """See `bpo_jax.models.tree_attention.tree_attention`; differentiable in q, k and v.

    Sums are float32. Products of float32 inputs are float32 too, whatever the default precision of
    matrix products, and those of bfloat16 inputs take their weights in bfloat16.

    Args:
      q_bshd: queries [b, s, h, d].
      k_btkd: keys [b, t, k, d].
      v_btkd: values [b, t, k, d].
      query_index_bs: int32, which tokens the queries are, ascending, -1 for padding.
      subtree_end_bt: int32, one past the last token below each.
      block_q, block_k: queries and keys of a block, multiples of 128; shorter rows have smaller
        ones.
      interpret: compute the kernels step by step on any device, for tests.

    Raises:
      ValueError: a block that is no multiple of 128, or a row of more pairs of blocks than a list
        may hold.
    """
    b, s, h, _ = q_bshd.shape
    t, kv = k_btkd.shape[1:3]
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < _LANES or block % _LANES:
            raise ValueError(f"{name}={block}: expected a multiple of {_LANES}")
    block_q, block_k = min(block_q, s + -s % _LANES), min(block_k, t + -t % _LANES)
    pairs = pl.cdiv(s, block_q) * pl.cdiv(t, block_k)
    if pairs > LIST_LIMIT:
        raise ValueError(
            f"{s} queries and {t} keys are {pairs} pairs of blocks, more than can be listed "
            f"({LIST_LIMIT}); use larger blocks than {block_q} and {block_k}"
        )
    sizes = _Sizes(block_q=block_q, block_k=block_k, group=h // kv, interpret=interpret)

    def rows(q_bshd, k_btkd, v_btkd, index_bs, end_bt):
        # Heads before tokens: a block is a matrix of tokens by features.
        q, k, v = (
            jnp.swapaxes(_pad(x, block), 1, 2)
            for x, block in ((q_bshd, block_q), (k_btkd, block_k), (v_btkd, block_k))
        )
        # A padding query sees nothing; a padding key ends before it begins, so nothing sees it.
        index, end = _pad(index_bs, block_q, fill=-1), _pad(end_bt, block_k)
        out = _attend(sizes, q, k, v, index.astype(jnp.int32), end.astype(jnp.int32))
        return jnp.swapaxes(out, 1, 2)[:, :s]

    # As many rows in one call as can be listed; 32k tokens in blocks of 512 are 32 rows.
    step = LIST_LIMIT // pairs
    arguments = (q_bshd, k_btkd, v_btkd, query_index_bs, subtree_end_bt)
    parts = [rows(*(x[n : n + step] for x in arguments)) for n in range(0, b, step)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _pad(x: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """`x` with its second axis filled up to a multiple of `block`."""
    widths = ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is fixed when the kernels are traced.

    Attributes:
      block_q, block_k: queries and keys of a block.
      group: query heads of a key head.
      interpret: see `attend`.
    """

    block_q: int
    block_k: int
    group: int
    interpret: bool


def _specs(sizes: _Sizes, d: int, locate: Callable[..., Any]) -> dict[str, pl.BlockSpec]:
    """Which part of each array a step needs.

    Args:
      sizes: of the blocks.
      d: size of a head.
      locate: (place in the grid, list of pairs) -> (row, query head, key head, query block, key
        block).

    Returns:
      Of ``q`` [b, h, s, d], ``k`` [b, k, t, d], ``scalar`` [b, h, 1, s], ``index`` [b, 1, s] and
      ``end`` [b, 1, t].
    """

    def spec(shape: tuple[int | None, ...], choose: Callable[..., Any]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *place: choose(*locate(*place)))

    return {
        "q": spec((None, None, sizes.block_q, d), lambda b, h, k, i, j: (b, h, i, 0)),
        "k": spec((None, None, sizes.block_k, d), lambda b, h, k, i, j: (b, k, j, 0)),
        "scalar": spec((None, None, 1, sizes.block_q), lambda b, h, k, i, j: (b, h, 0, i)),
        "index": spec((None, 1, sizes.block_q), lambda b, h, k, i, j: (b, 0, i)),
        "end": spec((None, 1, sizes.block_k), lambda b, h, k, i, j: (b, 0, j)),
    }


def _columns(row_1n: jax.Array) -> jax.Array:
    """[1, n] -> [n, 128], every column the same: numbers a token, ready to meet [n, m] scores."""
    return jnp.broadcast_to(row_1n, (_LANES, row_1n.shape[1])).T


def _rows(columns: jax.Array) -> jax.Array:
    """The inverse of `_columns`."""
    return columns.T[:1]


def _wide(columns: jax.Array, width: int) -> jax.Array:
    """[n, 128] of equal columns -> [n, width]; copies registers where a broadcast would shuffle."""
    return jnp.tile(columns, (1, pl.cdiv(width, _LANES)))[:, :width]


def _dot(x: jax.Array, y: jax.Array, axis_x: int = 1, axis_y: int = 0) -> jax.Array:
    """The float32 product of matrices that contracts these axes."""
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        x,
        y,
        (((axis_x,), (axis_y,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _key_index(block: Any, shape: tuple[int, int], axis: int) -> jax.Array:
    """Indices of the keys of a block, which lie along `axis`."""
    return block * shape[axis] + lax.broadcasted_iota(jnp.int32, shape, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes, q, k, v, index_bs, end_bt):
    """Attention of q [b, h, s, d] to k and v [b, k, t, d], whole blocks of each."""
    return _forward(sizes, q, k, v, index_bs, end_bt)[0]


def _live(sizes: _Sizes, index_bs: jax.Array, end_bt: jax.Array) -> jax.Array:
    return visibility.live_blocks(index_bs, end_bt, block_q=sizes.block_q, block_k=sizes.block_k)


def _written(x_bhtd: jax.Array, live_bn: jax.Array) -> jax.Array:
    """Zero in the blocks that no pair was listed for, which no step has written."""
    b, h, t, d = x_bhtd.shape
    x = x_bhtd.reshape(b, h, live_bn.shape[1], -1, d)
    return jnp.where(live_bn[:, None, :, None, None], x, 0).reshape(b, h, t, d)


def _call(
    kernel: Callable[..., None],
    name: str,
    sizes: _Sizes,
    grid: tuple[Any, ...],
    pairs: jax.Array,
    inputs: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[tuple[pl.BlockSpec, tuple[int, ...], Any]],
    scratch: list[tuple[tuple[int, int], Any]],
) -> Any:
    """Runs a kernel over heads, pairs and perhaps more."""
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec for spec, _ in inputs],
            out_specs=[spec for spec, _, _ in outputs],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
        # Heads are independent, so a chip with two cores splits them.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL,) + (pltpu.ARBITRARY,) * (len(grid) - 1)
        ),
        interpret=sizes.interpret,
    )(pairs, *(x for _, x in inputs))


def _by_query(sizes: _Sizes, live: jax.Array) -> tuple[Pairs, jax.Array, jax.Array, Any]:
    """The walk query block by query block: its order, the list, its length, where a step is."""
    order = Pairs(major=live.shape[1], minor=live.shape[2])
    pairs, count = order.listed(live)

    def locate(h, n, pairs):
        row, i, j = order.at(pairs, n)
        return row, h, lax.div(h, sizes.group), i, j

    return order, pairs, count, locate


def _forward(sizes, q, k, v, index_bs, end_bt):
    b, h, s, d = q.shape
    live = _live(sizes, index_bs, end_bt)
    order, pairs, count, locate = _by_query(sizes, live)
    block_q, block_k = sizes.block_q, sizes.block_k

    def kernel(pairs, q, k, v, index, end, out, log_total, index_col, top, total, gathered):
        n = pl.program_id(1)
        first, last = order.ends(pairs, n)

        @pl.when(first)
        def _():
            index_col[...] = _columns(index[...])
            top[...] = jnp.full_like(top, _FLOOR)
            total[...] = jnp.zeros_like(total)
            gathered[...] = jnp.zeros_like(gathered)

        scores = _dot(q[...], k[...], 1, 1) * d**-0.5
        key = _key_index(order.at(pairs, n)[2], (1, block_k), 1)
        seen = visibility.visible(_wide(index_col[...], block_k), key, end[...])
        scores = jnp.where(seen, scores, _FLOOR)
        old_top = top[...]
        new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
        # Of a query that has seen nothing so far all weights are 1: the first score it sees wipes
        # what they gathered, since `keep` is then 0.
        weights = jnp.exp(scores - _wide(new_top, block_k))
        keep = jnp.exp(old_top - new_top)
        top[...] = new_top
        total[...] = total[...] * keep + jnp.sum(weights, axis=1, keepdims=True)
        part = _dot(weights.astype(v.dtype), v[...])
        gathered[...] = gathered[...] * _wide(keep, d) + part

        @pl.when(last)
        def _():
            saw = top[...] > _FLOOR
            inverse = jnp.where(saw, 1.0 / total[...], 0.0)
            out[...] = (gathered[...] * _wide(inverse, d)).astype(out.dtype)
            log_total[...] = _rows(jnp.where(saw, top[...] + jnp.log(total[...]), 0.0))

    at = _specs(sizes, d, locate)
    inputs = [(at["q"], q), (at["k"], k), (at["k"], v)]
    inputs += [(at["index"], index_bs[:, None]), (at["end"], end_bt[:, None])]
    columns = (block_q, _LANES)
    out, log_total = _call(
        kernel,
        "tree_attention_forward",
        sizes,
        (h, count),
        pairs,
        inputs,
        [(at["q"], q.shape, q.dtype), (at["scalar"], (b, h, 1, s), jnp.float32)],
        [(columns, jnp.int32), (columns, jnp.float32), (columns, jnp.float32)]
        + [((block_q, d), jnp.float32)],
    )
    out = _written(out, jnp.any(live, axis=2))
    out, log_total = (checkpoint_name(x, ATTENTION_RESULTS) for x in (out, log_total))
    return out, (q, k, v, index_bs, end_bt, out, log_total)


def _backward(sizes, saved, d_out):
    q, k, v, index_bs, end_bt, out, log_total = saved
    live = _live(sizes, index_bs, end_bt)
    # The gradient of a score is its weight times (its part of d_out - the mean of all parts).
    mean = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)[:, :, None]
    arguments = (q, k, v, d_out, log_total, mean, index_bs[:, None], end_bt[:, None])
    names = ("q", "k", "k", "q", "scalar", "scalar", "index", "end")
    d_q = _gradient_of_queries(sizes, live, arguments, names)
    d_k, d_v = _gradient_of_keys(sizes, live, arguments, names)
    return d_q, d_k, d_v, None, None


def _gradient_of_queries(sizes, live, arguments, names):
    q = arguments[0]
    h, d = q.shape[1], q.shape[3]
    order, pairs, count, locate = _by_query(sizes, live)
    block_q, block_k = sizes.block_q, sizes.block_k

    def kernel(
        pairs, q, k, v, d_out, log_total, mean, index, end, d_q, index_col, log_col, mean_col, sums
    ):
        n = pl.program_id(1)
        first, last = order.ends(pairs, n)

        @pl.when(first)
        def _():
            index_col[...] = _columns(index[...])
            log_col[...] = _columns(log_total[...])
            mean_col[...] = _columns(mean[...])
            sums[...] = jnp.zeros_like(sums)

        key = _key_index(order.at(pairs, n)[2], (1, block_k), 1)
        seen = visibility.visible(_wide(index_col[...], block_k), key, end[...])
        scores = _dot(q[...], k[...], 1, 1) * d**-0.5
        weights = jnp.where(seen, jnp.exp(scores - _wide(log_col[...], block_k)), 0.0)
        d_weights = _dot(d_out[...], v[...], 1, 1)
        d_scores = weights * (d_weights - _wide(mean_col[...], block_k))
        sums[...] += _dot(d_scores.astype(k.dtype), k[...])

        @pl.when(last)
        def _():
            d_q[...] = (sums[...] * d**-0.5).astype(d_q.dtype)

    at = _specs(sizes, d, locate)
    columns = (block_q, _LANES)
    (d_q,) = _call(
        kernel,
        "tree_attention_d_queries",
        sizes,
        (h, count),
        pairs,
        [(at[name], x) for name, x in zip(names, arguments, strict=True)],
        [(at["q"], q.shape, q.dtype)],
        [(columns, jnp.int32), (columns, jnp.float32), (columns, jnp.float32)]
        + [((block_q, d), jnp.float32)],
    )
    return _written(d_q, jnp.any(live, axis=2))


def _gradient_of_keys(sizes, live, arguments, names):
    k = arguments[1]
    kv, d = k.shape[1], k.shape[3]
    group, block_q, block_k = sizes.group, sizes.block_q, sizes.block_k
    order = Pairs(major=live.shape[2], minor=live.shape[1])
    pairs, count = order.listed(jnp.swapaxes(live, 1, 2))

    def locate(head, n, member, pairs):
        row, j, i = order.at(pairs, n)
        return row, head * group + member, head, i, j

    def kernel(
        pairs, q, k, v, d_out, log_total, mean, index, end, d_k, d_v, end_col, sums_k, sums_v
    ):
        n, member = pl.program_id(1), pl.program_id(2)
        first, last = order.ends(pairs, n)

        @pl.when(first & (member == 0))
        def _():
            end_col[...] = _columns(end[...])
            sums_k[...] = jnp.zeros_like(sums_k)
            sums_v[...] = jnp.zeros_like(sums_v)

        # Keys before queries: so the sums over queries are plain products.
        key = _key_index(order.at(pairs, n)[1], (block_k, block_q), 0)
        seen = visibility.visible(index[...], key, _wide(end_col[...], block_q))
        scores = _dot(k[...], q[...], 1, 1) * d**-0.5
        weights = jnp.where(seen, jnp.exp(scores - log_total[...]), 0.0)
        sums_v[...] += _dot(weights.astype(d_out.dtype), d_out[...])
        d_weights = _dot(v[...], d_out[...], 1, 1)
        d_scores = weights * (d_weights - mean[...])
        sums_k[...] += _dot(d_scores.astype(q.dtype), q[...])

        @pl.when(last & (member == group - 1))
        def _():
            d_k[...] = (sums_k[...] * d**-0.5).astype(d_k.dtype)
            d_v[...] = sums_v[...].astype(d_v.dtype)

    at = _specs(sizes, d, locate)
    block = ((block_k, d), jnp.float32)
    d_k, d_v = _call(
        kernel,
        "tree_attention_d_keys",
        sizes,
        (kv, count, group),
        pairs,
        [(at[name], x) for name, x in zip(names, arguments, strict=True)],
        [(at["k"], k.shape, k.dtype), (at["k"], k.shape, k.dtype)],
        [((block_k, _LANES), jnp.int32), block, block],
    )
    return tuple(_written(x, jnp.any(live, axis=1)) for x in (d_k, d_v))


_attend.defvjp(_forward, _backward)
