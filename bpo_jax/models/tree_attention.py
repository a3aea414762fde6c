"""Attention over packed trees: one entry point, and the dense reference.

Which token sees which is defined in `bpo_jax.models.visibility`, for every implementation alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bpo_jax.models import chunked_attention, partition, visibility

Implementation = Literal["auto", "dense", "chunked", "flash"]
IMPLEMENTATIONS = ("auto", "dense", "chunked", "flash")

DENSE_UP_TO = 256
"""Rows up to this length have too few blocks for skipping to pay."""
DENSE_LIMIT = 2**34
"""Bytes of scores that the dense implementation refuses to make."""


def tree_attention(
    q_bshd: Float[Array, "b s h d"],
    k_btkd: Float[Array, "b t k d"],
    v_btkd: Float[Array, "b t k d"],
    subtree_end_bt: Int[Array, "b t"],
    query_index_bs: Int[Array, "b s"] | None = None,
    *,
    implementation: Implementation = "auto",
    block: int | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "b s h d"]:
    """softmax(q k^T / sqrt(d)) v, where a token sees its ancestors and itself.

    Query head i uses key/value head ``i // (h / k)``. The softmax is computed in float32. A query
    that sees nothing (padding) gets 0.

    Args:
      q_bshd: queries; h is a multiple of k.
      k_btkd: keys of all tokens of the row.
      v_btkd: values.
      subtree_end_bt: one past the last token below each token of the row.
      query_index_bs: which tokens of the row are the queries, ascending, -1 for padding; all of
        them where None (then s = t).
      implementation: "dense" builds [s, t] scores; "chunked" skips blocks in which no query sees a
        key, forward and backward, in memory linear in t, on any device; "flash" does the same in
        kernels of a TPU; "auto" chooses among the first two by length.
      block: queries and keys of a block; what is measured to be best where None.
      mesh: every device attends its own rows and heads of it (`bpo_jax.models.partition`). Left to
        itself, the compiler would gather all rows for a loop whose bounds depend on the data.

    Raises:
      ValueError: an unknown implementation, head counts that do not divide, or scores that "dense"
        could not hold.
    """
    b, s, h, _ = q_bshd.shape
    t, kv = k_btkd.shape[1:3]
    if h % kv:
        raise ValueError(f"{h} query heads are not a multiple of {kv} key heads")
    if query_index_bs is None:
        query_index_bs = visibility.all_tokens(subtree_end_bt)
    if mesh is not None and mesh.size > 1:
        local = functools.partial(tree_attention, implementation=implementation, block=block)
        return _on_mesh(local, mesh, q_bshd, k_btkd, v_btkd, subtree_end_bt, query_index_bs)
    if implementation == "auto":
        implementation = "dense" if t <= DENSE_UP_TO else "chunked"
    if implementation == "dense":
        size = 4 * b * h * s * t
        if size > DENSE_LIMIT:
            raise ValueError(
                f"dense attention of {s} queries and {t} keys would make {size / 2**30:.0f} GiB of "
                "scores; use attention='chunked', whose memory is linear in the length"
            )
        return _dense(q_bshd, k_btkd, v_btkd, query_index_bs, subtree_end_bt)
    if implementation == "chunked":
        return chunked_attention.attend(
            q_bshd,
            k_btkd,
            v_btkd,
            query_index_bs,
            subtree_end_bt,
            block_q=block or chunked_attention.BLOCK_Q,
            block_k=block or chunked_attention.BLOCK_K,
        )
    if implementation == "flash":
        # Imported where it is used: Pallas takes a second, and a CPU has no use for it.
        from bpo_jax.models import flash_attention

        return flash_attention.attend(
            q_bshd,
            k_btkd,
            v_btkd,
            query_index_bs,
            subtree_end_bt,
            block_q=block or flash_attention.BLOCK_Q,
            block_k=block or flash_attention.BLOCK_K,
        )
    raise ValueError(f"attention {implementation!r}: expected {', '.join(IMPLEMENTATIONS)}")


def _on_mesh(
    local: Callable[..., jax.Array],
    mesh: Mesh,
    q_bshd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    subtree_end_bt: jax.Array,
    query_index_bs: jax.Array,
) -> jax.Array:
    h, kv = q_bshd.shape[2], k_btkd.shape[2]
    heads_ways = partition.ways(mesh, "heads")
    if h % heads_ways == 0 and heads_ways % kv == 0:
        # Fewer key heads than devices: each gets a copy of the one its query heads use.
        k_btkd, v_btkd = (jnp.repeat(x, heads_ways // kv, axis=2) for x in (k_btkd, v_btkd))
    split = h % heads_ways == 0 and k_btkd.shape[2] % heads_ways == 0
    heads = "heads" if split else None
    on_rows = partition.spec(mesh, ("batch",), q_bshd.shape[:1])
    on_heads = partition.spec(mesh, ("batch", None, heads, None), q_bshd.shape)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(on_heads, on_heads, on_heads, on_rows, on_rows),
        out_specs=on_heads,
        check_vma=False,  # loops over blocks carry values that start the same everywhere
    )(q_bshd, k_btkd, v_btkd, subtree_end_bt, query_index_bs)


def _dense(
    q_bshd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    query_index_bs: jax.Array,
    subtree_end_bt: jax.Array,
) -> jax.Array:
    b, s, h, d = q_bshd.shape
    t, kv = k_btkd.shape[1:3]
    q_bskgd = q_bshd.reshape(b, s, kv, h // kv, d)
    accumulate = jnp.promote_types(q_bshd.dtype, jnp.float32)
    scores = jnp.einsum("bikgd,bjkd->bkgij", q_bskgd, k_btkd, preferred_element_type=accumulate)
    seen_bij = visibility.visible(
        query_index_bs[:, :, None], jnp.arange(t), subtree_end_bt[:, None, :]
    )
    seen = seen_bij[:, None, None]
    # A finite floor, so that a row that sees nothing has a gradient of zero and not of nan.
    scores = jnp.where(seen, scores * d**-0.5, -1e30)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0).astype(v_btkd.dtype)
    return jnp.einsum("bkgij,bjkd->bikgd", weights, v_btkd).reshape(b, s, h, d)
