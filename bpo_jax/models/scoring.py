"""Scores of packed trees: the log-prob of every token where it was sampled, all branches at once.

`token_scores` computes a whole batch and is what is differentiated. `score` takes what an earlier
call has left, and computes only tokens that are new: a prompt that grows by a turn, a tree that
grows by a branch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from bpo_jax.models import decoder, logprobs
from bpo_jax.models.config import DecoderConfig
from bpo_jax.models.decoder import Params
from bpo_jax.packing import TreeBatch

BUCKET = 128
"""Numbers of new tokens are rounded up to a multiple of this, so that few sizes are compiled."""


def token_scores(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: TreeBatch,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Log-prob of every token and the entropy it was drawn with, float32.

    A token is predicted where it was sampled, at its parent, which at a fork is not the token
    before it. Tokens without a parent, which nothing predicts, have 0 for both.

    Args:
      graphdef: the decoder's static description.
      params: its parameters.
      batch: packed trees.
      temperature: divides the logits.
      chunk: tokens whose logits exist at the same time, on every device.
      mesh: devices that rows and model are spread over; see `bpo_jax.models.partition`.
    """
    model = nnx.merge(graphdef, params)
    hidden_btd = model(batch.tokens, batch.position, batch.subtree_end, mesh=mesh)
    return _scores(
        model, hidden_btd, batch.parent, batch.tokens,
        temperature=temperature, chunk=chunk, mesh=mesh,
    )  # fmt: skip


def token_scores_and_values(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: TreeBatch,
    *,
    train_trunk: bool = False,
    **settings: Any,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"], Float[Array, "b t"]]:
    """`token_scores`, and the value head's number at every token's parent, float32.

    The value is that of the decision where the token is the first one sampled there. Tokens without
    a parent have 0.

    Args:
      graphdef: the decoder's static description; it has a value head.
      params: its parameters.
      batch: packed trees.
      train_trunk: let gradients of values pass into what the head reads.
      **settings: as of `token_scores`.
    """
    model = nnx.merge(graphdef, params)
    hidden_btd = model(batch.tokens, batch.position, batch.subtree_end, mesh=settings.get("mesh"))
    logprob, entropy = _scores(model, hidden_btd, batch.parent, batch.tokens, **settings)
    read_btd = hidden_btd if train_trunk else jax.lax.stop_gradient(hidden_btd)
    value_bt = jnp.take_along_axis(model.values(read_btd), jnp.maximum(batch.parent, 0), axis=1)
    return logprob, entropy, jnp.where(batch.parent >= 0, value_bt, 0.0)


def _scores(
    model: decoder.Decoder,
    hidden_btd: jax.Array,
    parent_bs: jax.Array,
    token_bs: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of some tokens, each predicted at its parent in the row."""
    source_bsd = jnp.take_along_axis(hidden_btd, jnp.maximum(parent_bs, 0)[..., None], axis=1)
    logprob, entropy = logprobs.token_logprobs(source_bsd, model.head_dv(), token_bs, **settings)
    predicted = parent_bs >= 0
    return jnp.where(predicted, logprob, 0.0), jnp.where(predicted, entropy, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixCache:
    """What `score` has computed of packed trees, in the order of their tokens.

    It belongs to one set of parameters and one temperature; nothing in it says so.

    Attributes:
      tokens, parent: int32 [b, t], NumPy, of the batch that was scored; padding has parent -1 and
        ``subtree_end`` at its own index.
      valid: bool [b, t], NumPy, False in padding.
      keys_values: of every layer, [layers, b, t, kv_heads, head_dim] each.
      hidden: [b, t, d] after the final norm.
      logprob, entropy: float32 [b, t].
    """

    tokens: np.ndarray
    parent: np.ndarray
    valid: np.ndarray
    keys_values: decoder.KeysValues
    hidden: jax.Array
    logprob: jax.Array
    entropy: jax.Array


def score(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: TreeBatch,
    cache: PrefixCache | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"], PrefixCache]:
    """`token_scores` with reuse: only tokens whose path is not in `cache` are computed.

    A token is in the cache if one with the same path, from the root down, is in the same row of it;
    where either lies in its row does not matter. So trees may grow anywhere: longer branches, new
    siblings, new trees.

    Args:
      graphdef: the decoder's static description.
      params: its parameters, those the cache was made with.
      batch: packed trees, NumPy arrays.
      cache: what an earlier call returned; it can be used again.
      temperature: as in the call that made the cache.
      chunk: tokens whose logits exist at the same time, on every device.
      mesh: devices that rows and model are spread over.

    Returns:
      Log-probs and entropies as of `token_scores` (0 in padding), and the cache of `batch`.

    Raises:
      ValueError: a cache of another number of rows.
    """
    rows, length = batch.tokens.shape
    if cache is None:
        cache = _empty(nnx.merge(graphdef, params).config, rows)
    if len(cache.tokens) != rows:
        raise ValueError(f"the cache has {len(cache.tokens)} rows, the batch {rows}")
    valid = np.asarray(batch.subtree_end) > np.arange(length)
    found = np.stack([_find(cache, batch, valid, row) for row in range(rows)])
    new = [np.flatnonzero(valid[row] & (found[row] < 0)) for row in range(rows)]
    size = max(BUCKET, -(-max(map(len, new)) // BUCKET) * BUCKET)
    index = np.full((rows, size), -1, np.int32)
    for row, where in enumerate(new):
        index[row, : len(where)] = where
    kept = (cache.keys_values, cache.hidden, cache.logprob, cache.entropy)
    keys_values, hidden, logprob, entropy = _score_new(
        graphdef,
        params,
        kept,
        found,
        batch,
        index,
        temperature=temperature,
        chunk=chunk,
        mesh=mesh,
    )
    extended = PrefixCache(
        tokens=np.asarray(batch.tokens),
        parent=np.asarray(batch.parent),
        valid=valid,
        keys_values=keys_values,
        hidden=hidden,
        logprob=logprob,
        entropy=entropy,
    )
    return logprob, entropy, extended


def new_tokens(batch: TreeBatch, cache: PrefixCache) -> int:
    """How many tokens `score` would compute."""
    valid = np.asarray(batch.subtree_end) > np.arange(batch.tokens.shape[1])
    found = [_find(cache, batch, valid, row) for row in range(len(valid))]
    return int(sum(np.sum(v & (f < 0)) for v, f in zip(valid, found, strict=True)))


def _empty(config: DecoderConfig, rows: int) -> PrefixCache:
    none = np.zeros((rows, 0), np.int32)
    shape = (config.num_layers, rows, 0, config.num_kv_heads, config.head_dim)
    return PrefixCache(
        tokens=none,
        parent=none,
        valid=none.astype(bool),
        keys_values=(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)),
        hidden=jnp.zeros((rows, 0, config.hidden_size), config.dtype),
        logprob=jnp.zeros((rows, 0)),
        entropy=jnp.zeros((rows, 0)),
    )


def _find(cache: PrefixCache, batch: TreeBatch, valid: np.ndarray, row: int) -> np.ndarray:
    """Index in the cache's row of each token's path; -1 for those not in it."""
    known: dict[tuple[int, int], int] = {}
    # In preorder a parent precedes its children, so a path is known by its last two links. Where
    # two siblings begin alike, the path of the first stands for both, and so on below.
    stands_for = np.arange(cache.tokens.shape[1])
    columns = (cache.tokens[row].tolist(), cache.parent[row].tolist(), cache.valid[row].tolist())
    for at, (token, parent, real) in enumerate(zip(*columns, strict=True)):
        if real:
            link = (int(stands_for[parent]) if parent >= 0 else -1, token)
            stands_for[at] = known.setdefault(link, at)
    found = np.full(batch.tokens.shape[1], -1, np.int32)
    columns = (
        np.asarray(batch.tokens[row]).tolist(),
        np.asarray(batch.parent[row]).tolist(),
        valid[row].tolist(),
    )
    for at, (token, parent, real) in enumerate(zip(*columns, strict=True)):
        above = int(found[parent]) if parent >= 0 else -1
        if real and (parent < 0 or above >= 0):
            found[at] = known.get((above, token), -1)
    return found


@functools.partial(jax.jit, static_argnums=0, static_argnames=("temperature", "chunk", "mesh"))
def _score_new(
    graphdef: nnx.GraphDef,
    params: Params,
    kept: Any,
    found_bt: jax.Array,
    batch: TreeBatch,
    index_bs: jax.Array,
    *,
    temperature: float,
    chunk: int,
    mesh: Mesh | None,
) -> Any:
    """Moves what is known to its new places and computes the tokens at `index_bs`."""
    rows, length = batch.tokens.shape
    row = jnp.arange(rows)[:, None]
    place_bs = jnp.where(index_bs < 0, length, index_bs)

    def moved(old: jax.Array, axis: int) -> jax.Array:
        """`old` in the order of the batch; 0 where it has nothing. `axis` is that of rows."""
        if old.shape[axis + 1] == 0:
            shape = (*old.shape[: axis + 1], length, *old.shape[axis + 2 :])
            return jnp.zeros(shape, old.dtype)

        def of_row(x: jax.Array, found_t: jax.Array) -> jax.Array:
            taken = jnp.take(x, found_t, axis=axis, mode="clip")
            known = (found_t >= 0).reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1))
            return jnp.where(known, taken, jnp.zeros((), x.dtype))

        return jax.vmap(of_row, in_axes=(axis, 0), out_axes=axis)(old, found_bt)

    def at(x_bt: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_bt, jnp.maximum(index_bs, 0), axis=1)

    def put(old_bt: jax.Array, new_bs: jax.Array) -> jax.Array:
        return old_bt.at[row, place_bs].set(new_bs, mode="drop")

    model = nnx.merge(graphdef, params)
    keys_values, hidden, logprob, entropy = kept
    new_hidden, keys_values = model.extend(
        at(batch.tokens), at(batch.position), index_bs, batch.subtree_end,
        tuple(moved(x, 1) for x in keys_values), mesh=mesh,
    )  # fmt: skip
    hidden = put(moved(hidden, 0), new_hidden)
    new = _scores(
        model, hidden, at(batch.parent), at(batch.tokens),
        temperature=temperature, chunk=chunk, mesh=mesh,
    )  # fmt: skip
    logprob, entropy = (put(moved(x, 0), y) for x, y in zip((logprob, entropy), new, strict=True))
    return keys_values, hidden, logprob, entropy
