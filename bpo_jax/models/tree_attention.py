"""Attention over packed trees.

A tree's tokens lie in preorder, so all that is below token k is the interval [k, subtree_end[k]), and
query i sees key j exactly when ``j <= i < subtree_end[j]``. One integer per token holds the whole
mask; several trees share a row without a segment id.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Implementation = Literal["auto", "dense", "chunked"]


def tree_attention(
    q_bthd: Float[Array, "b t h d"],
    k_btkd: Float[Array, "b t k d"],
    v_btkd: Float[Array, "b t k d"],
    subtree_end_bt: Int[Array, "b t"],
    *,
    implementation: Implementation = "auto",
    block: int = 256,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over each token's ancestors and itself."""
    del implementation, block
    return _dense(q_bthd, k_btkd, v_btkd, subtree_end_bt)


def _dense(q_bthd, k_btkd, v_btkd, subtree_end_bt):
    b, t, h, d = q_bthd.shape
    kv = k_btkd.shape[2]
    q_btkgd = q_bthd.reshape(b, t, kv, h // kv, d)
    scores = jnp.einsum("bikgd,bjkd->bkgij", q_btkgd, k_btkd, preferred_element_type=jnp.float32)
    index = jnp.arange(t)
    seen_bij = (index[None, None, :] <= index[None, :, None]) & (
        index[None, :, None] < subtree_end_bt[:, None, :]
    )
    seen = seen_bij[:, None, None]
    scores = jnp.where(seen, scores * d**-0.5, -1e30)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0).astype(v_btkd.dtype)
    return jnp.einsum("bkgij,bjkd->bikgd", weights, v_btkd).reshape(b, t, h, d)
