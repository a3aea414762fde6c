"""Keys and values on the device: the pool of pages, and the workspace a batch is sampled in.

The pool is what lasts: the tokens of all branches, page by page. XLA has no product that reads
through a page table, so the pages of a batch are first laid out in a row each (`load`); what is
sampled there is written back to the pages once per call (`write`). The past that branches have in
common since a fork is left in the pool and read there once for all of them; see
`bpo_jax.rollout.decoding`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bpo_jax.models.config import DecoderConfig
from bpo_jax.rollout.pages import PAGE


class Pool(NamedTuple):
    """Attributes:
    keys: [layers, pages * PAGE, kv_heads, head_dim]; page p holds the tokens from p * PAGE on.
    values: as `keys`.
    hidden: [places, hidden_size], last hidden states, from which a next token is sampled.
    """

    keys: jax.Array
    values: jax.Array
    hidden: jax.Array


class Workspace(NamedTuple):
    """The tokens of a batch that no other branch shares, and room for what is sampled.

    Attributes:
      keys: of every layer [b, kv_heads, head_dim, length + window].
      values: of every layer [b, kv_heads, length + window, head_dim]. These are the two orders in
        which the products of one new token read them without a copy.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class Copies(NamedTuple):
    """Pages to copy before anything else: ``source[i]`` to ``target[i]`` for i < number."""

    source: Int[np.ndarray, "n"]
    target: Int[np.ndarray, "n"]
    number: np.int32


def empty_pool(config: DecoderConfig, pages: int, places: int) -> Pool:
    """A pool of zeros; `pages` without page 0."""
    shape = (config.num_layers, (pages + 1) * PAGE, config.num_kv_heads, config.head_dim)
    return Pool(
        keys=jnp.zeros(shape, config.dtype),
        values=jnp.zeros(shape, config.dtype),
        hidden=jnp.zeros((places, config.hidden_size), config.dtype),
    )


def bytes_per_token(config: DecoderConfig) -> int:
    """Of keys and values, in all layers."""
    size = jnp.dtype(config.dtype).itemsize
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * size


def copy_pages(pool: Pool, copies: Copies) -> Pool:
    """Makes the copies, in place where the pool is donated."""

    def body(i, arrays):
        def one(x):
            size = (x.shape[0], PAGE, *x.shape[2:])
            page = jax.lax.dynamic_slice(x, (0, copies.source[i] * PAGE, 0, 0), size)
            return jax.lax.dynamic_update_slice(x, page, (0, copies.target[i] * PAGE, 0, 0))

        return tuple(one(x) for x in arrays)

    keys, values = jax.lax.fori_loop(0, copies.number, body, (pool.keys, pool.values))
    return pool._replace(keys=keys, values=values)


def pages_at(
    x: Float[Array, "l slots k d"], layer: int | jax.Array, pages: Int[Array, "... n"]
) -> Float[Array, "... t k d"]:
    """The tokens on some pages of a layer, in order."""
    layers, slots, kv, d = x.shape
    flat = x.reshape(layers * (slots // PAGE), PAGE, kv, d)
    # One index over layers and pages: a slice of the layer would be a copy of all of it.
    out = jnp.take(flat, layer * (slots // PAGE) + pages, axis=0, mode="clip")
    return out.reshape(*pages.shape[:-1], pages.shape[-1] * PAGE, kv, d)


def load(pool: Pool, pages_bn: Int[Array, "b n"], window: int) -> Workspace:
    """Lays out the pages of every row, with room for `window` tokens behind them."""
    room = [(0, 0)] * 4
    keys, values = [], []
    for layer in range(pool.keys.shape[0]):
        k_btkd = pages_at(pool.keys, layer, pages_bn)
        v_btkd = pages_at(pool.values, layer, pages_bn)
        keys.append(jnp.pad(k_btkd.transpose(0, 2, 3, 1), [*room[:3], (0, window)]))
        values.append(jnp.pad(v_btkd.transpose(0, 2, 1, 3), [*room[:2], (0, window), (0, 0)]))
    return Workspace(keys=tuple(keys), values=tuple(values))


def write(
    pool: Pool,
    keys_lbskd: Float[Array, "l b s k d"],
    values_lbskd: Float[Array, "l b s k d"],
    slots_bs: Int[Array, "b s"],
    columns: int | jax.Array,
) -> Pool:
    """Writes the tokens of the first `columns` columns to `slots_bs`, in place where donated."""
    b = slots_bs.shape[0]

    def body(i, arrays):
        column, row = i // b, i % b

        def one(x, new):
            size = (new.shape[0], 1, 1, *new.shape[3:])
            token = jax.lax.dynamic_slice(new, (0, row, column, 0, 0), size)[:, 0]
            return jax.lax.dynamic_update_slice(x, token, (0, slots_bs[row, column], 0, 0))

        return one(arrays[0], keys_lbskd), one(arrays[1], values_lbskd)

    keys, values = jax.lax.fori_loop(0, columns * b, body, (pool.keys, pool.values))
    return pool._replace(keys=keys, values=values)
