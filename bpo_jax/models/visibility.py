"""Which token of a packed row sees which: the one definition every attention is built on.

The tokens of a tree lie in preorder, so all that is below token j is the interval
[j, subtree_end[j]), and the query at index i sees key j exactly when ``j <= i < subtree_end[j]``.
One integer a token is the whole mask; several trees share a row without a segment id.

Queries are usually all tokens of the row, in order. Where some keys come from a cache, only the
remaining tokens are queries; each carries its index in the row, and -1 marks padding, which sees
nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def visible(
    query_index: Int[Array, "..."], key_index: Int[Array, "..."], subtree_end: Int[Array, "..."]
) -> Bool[Array, "..."]:
    """Whether the query at `query_index` sees the key at `key_index`; arguments broadcast.

    Args:
      query_index: index in the row, -1 for padding.
      key_index: index in the row.
      subtree_end: one past the last token below the key.
    """
    return (key_index <= query_index) & (query_index < subtree_end)


def live_blocks(
    query_index_bs: Int[Array, "b s"],
    subtree_end_bt: Int[Array, "b t"],
    *,
    block_q: int,
    block_k: int,
) -> Bool[Array, "b nq nk"]:
    """The pairs of blocks that have to be computed: those in which some query may see some key.

    No pair that is left out has a visible key in it. Where the queries are all tokens of the row,
    none is in it for nothing: the key whose subtree reaches farthest is seen by the first query
    behind it.

    Args:
      query_index_bs: indices of the queries, ascending but for padding of -1; s is a multiple of
        `block_q`.
      subtree_end_bt: one past the last token below each token; at most its own index where nothing
        sees it. t is a multiple of `block_k`.
      block_q, block_k: tokens of a block.
    """
    b, s = query_index_bs.shape
    t = subtree_end_bt.shape[1]
    query_bns = query_index_bs.reshape(b, s // block_q, block_q)
    last_bn = jnp.max(query_bns, axis=-1)
    first_bn = jnp.min(jnp.where(query_bns < 0, t, query_bns), axis=-1)
    key = jnp.arange(t, dtype=subtree_end_bt.dtype)
    reach_bt = jnp.where(subtree_end_bt > key, subtree_end_bt, 0)
    reach_bn = jnp.max(reach_bt.reshape(b, t // block_k, block_k), axis=-1)
    start_n = jnp.arange(t // block_k, dtype=subtree_end_bt.dtype) * block_k
    below = start_n[None, None, :] <= last_bn[:, :, None]
    return below & (first_bn[:, :, None] < reach_bn[:, None, :])


def whole_blocks(
    query_index_bs: Int[Array, "b s"],
    subtree_end_bt: Int[Array, "b t"],
    *,
    block_q: int,
    block_k: int,
) -> Bool[Array, "b nq nk"]:
    """The pairs of blocks in which every query sees every key, so that no mask is needed.

    Arguments as of `live_blocks`.
    """
    b, s = query_index_bs.shape
    t = subtree_end_bt.shape[1]
    query_bns = query_index_bs.reshape(b, s // block_q, block_q)
    first_bn, last_bn = jnp.min(query_bns, axis=-1), jnp.max(query_bns, axis=-1)
    shortest_bn = jnp.min(subtree_end_bt.reshape(b, t // block_k, block_k), axis=-1)
    last_key_n = (jnp.arange(t // block_k, dtype=subtree_end_bt.dtype) + 1) * block_k - 1
    below = last_key_n[None, None, :] <= first_bn[:, :, None]
    return below & (last_bn[:, :, None] < shortest_bn[:, None, :])


def all_tokens(subtree_end_bt: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """The query index of rows in which every token is a query."""
    index = jnp.arange(subtree_end_bt.shape[1], dtype=subtree_end_bt.dtype)
    return jnp.broadcast_to(index, jnp.shape(subtree_end_bt))
