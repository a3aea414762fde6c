"""Attention over packed trees: one entry point, and the dense reference.

The tokens of a tree lie in preorder, so all that is below token k is the interval
[k, subtree_end[k]), and query i sees key j exactly when ``j <= i < subtree_end[j]``. One integer a
token is the whole mask; several trees share a row without a segment id.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bpo_jax.models import chunked_attention

Implementation = Literal["auto", "dense", "chunked"]

DENSE_UP_TO = 256
"""Rows up to this length have too few blocks for skipping to pay."""


def tree_attention(
    q_bthd: Float[Array, "b t h d"],
    k_btkd: Float[Array, "b t k d"],
    v_btkd: Float[Array, "b t k d"],
    subtree_end_bt: Int[Array, "b t"],
    *,
    implementation: Implementation = "auto",
    block: int = 128,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v, where a token sees its ancestors and itself.

    Query head i uses key/value head ``i // (h / k)``. The softmax is computed in float32. A token
    that sees nothing (padding, whose ``subtree_end`` is its own index) gets 0.

    Args:
      q_bthd: queries; h is a multiple of k.
      k_btkd: keys.
      v_btkd: values.
      subtree_end_bt: one past the last token below each token of the row.
      implementation: "dense" builds [t, t] scores; "chunked" skips blocks in which no query sees a
        key, forward and backward, in memory linear in t; "auto" chooses by length.
      block: queries and keys of a block in "chunked".

    Raises:
      ValueError: an unknown implementation, or head counts that do not divide.
    """
    if q_bthd.shape[2] % k_btkd.shape[2]:
        raise ValueError(
            f"{q_bthd.shape[2]} query heads are not a multiple of {k_btkd.shape[2]} key heads"
        )
    if implementation == "auto":
        implementation = "dense" if q_bthd.shape[1] <= DENSE_UP_TO else "chunked"
    if implementation == "dense":
        return _dense(q_bthd, k_btkd, v_btkd, subtree_end_bt)
    if implementation == "chunked":
        return chunked_attention.attend(q_bthd, k_btkd, v_btkd, subtree_end_bt, block=block)
    raise ValueError(f"attention {implementation!r}: expected auto, dense or chunked")


def _dense(
    q_bthd: jax.Array, k_btkd: jax.Array, v_btkd: jax.Array, subtree_end_bt: jax.Array
) -> jax.Array:
    b, t, h, d = q_bthd.shape
    kv = k_btkd.shape[2]
    q_btkgd = q_bthd.reshape(b, t, kv, h // kv, d)
    accumulate = jnp.promote_types(q_bthd.dtype, jnp.float32)
    scores = jnp.einsum("bikgd,bjkd->bkgij", q_btkgd, k_btkd, preferred_element_type=accumulate)
    index = jnp.arange(t)
    seen_bij = (index <= index[:, None]) & (index[:, None] < subtree_end_bt[:, None, :])
    seen = seen_bij[:, None, None]
    # A finite floor, so that a row that sees nothing has a gradient of zero and not of nan.
    scores = jnp.where(seen, scores * d**-0.5, -1e30)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0).astype(v_btkd.dtype)
    return jnp.einsum("bkgij,bjkd->bikgd", weights, v_btkd).reshape(b, t, h, d)
