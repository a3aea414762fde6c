"""The compiled half of the engine: `prefill` computes what was read, `sample` says something.

A row's past lies in two places. What it shares with others since a fork is its *trunk*: whole tiles
of `TILE` tokens that stay in the pool, where each tile is read once for all rows of the batch that
continue it. The rest is in the workspace, a row each. Attention over the parts is merged by their
log-sum-exps, so that it is the same softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from bpo_jax.models.decoder import Decoder
from bpo_jax.rollout import kv_cache, sampling
from bpo_jax.rollout.pages import PAGE

TILE = 128
"""Tokens of a trunk that are read together, a multiple of `PAGE`."""
GROUP = 64
"""Rows that are multiplied with a tile at a time."""


class Tiles(NamedTuple):
    """The trunks of a batch; rows that continue a tile lie side by side.

    Attributes:
      pages: [n, TILE / PAGE].
      first: first row that continues each.
      beyond: one past the last.
      number: how many there are; what lies beyond means nothing.
    """

    pages: Int[np.ndarray, "n p"]
    first: Int[np.ndarray, "n"]
    beyond: Int[np.ndarray, "n"]
    number: np.int32


class PrefillBatch(NamedTuple):
    """Attributes:
    tokens: right-padded.
    counts: tokens in each row; 0 where it sits out.
    start: tokens of each row that are in its pages.
    pages: of each row, all of its past.
    slots: where in the pool each token goes, 0 for padding.
    place: where in `Pool.hidden` the last state goes, 0 for padding.
    copies: to be made first.
    """

    tokens: Int[np.ndarray, "b s"]
    counts: Int[np.ndarray, "b"]
    start: Int[np.ndarray, "b"]
    pages: Int[np.ndarray, "b n"]
    slots: Int[np.ndarray, "b s"]
    place: Int[np.ndarray, "b"]
    copies: kv_cache.Copies


class SampleBatch(NamedTuple):
    """Attributes:
    start: tokens of each row that are computed, its trunk included.
    own: of these, the ones in the workspace before its window.
    limit: most tokens to sample in each row; 0 where it sits out.
    key: of each row, see `sampling.uniforms`.
    slots: where in the pool each token goes that this call may compute.
    source: where in `Pool.hidden` each row's last state is.
    place: where it goes.
    offset: columns of the window that earlier calls have filled.
    enough: rows that may be left unfinished.
    tiles: the rows' trunks.
    copies: to be made first.
    """

    start: Int[np.ndarray, "b"]
    own: Int[np.ndarray, "b"]
    limit: Int[np.ndarray, "b"]
    key: UInt32[np.ndarray, "b 2"]
    slots: Int[np.ndarray, "b s"]
    source: Int[np.ndarray, "b"]
    place: Int[np.ndarray, "b"]
    offset: np.int32
    enough: np.int32
    tiles: Tiles
    copies: kv_cache.Copies


class Sampled(NamedTuple):
    """What `sample` made; beyond a row's count nothing means anything.

    Attributes:
      counts: tokens made in each row.
      ids: their ids.
      logprobs: under the distribution sampled from.
      entropies: of that distribution, in nats.
      raw_logprobs: without truncation.
    """

    counts: Int[Array, "b"]
    ids: Int[Array, "b s"]
    logprobs: Float[Array, "b s"]
    entropies: Float[Array, "b s"]
    raw_logprobs: Float[Array, "b s"]


def prefill(
    model: Decoder, pool: kv_cache.Pool, batch: PrefillBatch, heat: sampling.Heat
) -> tuple[kv_cache.Pool, Float[Array, "b"]]:
    """Appends up to s tokens to every row.

    Returns:
      The pool, and the entropy of what follows each row's last token.
    """
    pool = kv_cache.copy_pages(pool, batch.copies)
    s, t = batch.tokens.shape[1], batch.pages.shape[1] * PAGE
    past_b1t = jnp.arange(t) < batch.start[:, None, None]
    new_1st = jnp.tri(s, dtype=bool)[None]
    seen_bst = jnp.concatenate(
        [jnp.broadcast_to(m, (len(batch.tokens), s, m.shape[-1])) for m in (past_b1t, new_1st)], -1
    )

    def attend(layer, q, k, v):
        old = (
            kv_cache.pages_at(x, layer, jnp.asarray(batch.pages)) for x in (pool.keys, pool.values)
        )
        k_all, v_all = (
            jnp.concatenate([x.astype(new.dtype), new], axis=1)
            for x, new in zip(old, (k, v), strict=True)
        )
        return _attention(q, k_all, v_all, seen_bst), (k, v)

    position_bs = jnp.asarray(batch.start)[:, None] + jnp.arange(s)
    hidden_bsd, (keys, values) = model.run_scanned(jnp.asarray(batch.tokens), position_bs, attend)
    dtype = pool.keys.dtype
    pool = kv_cache.write(
        pool, keys.astype(dtype), values.astype(dtype), jnp.asarray(batch.slots), s
    )
    last_b = jnp.maximum(batch.counts - 1, 0)
    hidden_bd = jnp.take_along_axis(hidden_bsd, last_b[:, None, None], axis=1)[:, 0]
    pool = pool._replace(hidden=pool.hidden.at[batch.place].set(hidden_bd))
    return pool, sampling.next_entropy(hidden_bd, model.head_dv(), heat)


def sample(
    model: Decoder,
    pool: kv_cache.Pool,
    work: kv_cache.Workspace,
    batch: SampleBatch,
    heat: sampling.Heat,
    stop_ids: Int[Array, "n"],
    *,
    window: int,
) -> tuple[kv_cache.Pool, kv_cache.Workspace, Sampled]:
    """Samples until at most `enough` rows have met neither a stop token nor their limit.

    Every token is computed and written to its slot, save the last one of a row that is done: that
    is computed with what follows it.

    Args:
      window: columns of the workspace for sampled tokens.
    """
    pool = kv_cache.copy_pages(pool, batch.copies)
    head_dv, blocks = model.head_dv(), model.blocks()
    b, s = batch.slots.shape
    own = work.values[0].shape[2] - window

    def body(carry):
        step, hidden_bd, work, live_b, made = carry
        position_b = batch.start + step
        uniform_b = sampling.uniforms(jnp.asarray(batch.key), position_b)
        choice = sampling.choose(hidden_bd, head_dv, heat, uniform_b)

        def record(column_bs, new_b):
            return jax.lax.dynamic_update_slice(column_bs, new_b[:, None], (0, step))

        made = Sampled(made.counts + live_b, *map(record, made[1:], choice))
        stopped_b = jnp.any(choice.token_b[:, None] == stop_ids, axis=-1)
        live_b = live_b & ~stopped_b & (made.counts < batch.limit)

        def advance(work):
            column = own + batch.offset + step
            index = jnp.arange(work.values[0].shape[2])
            seen_bt = (index < batch.own[:, None]) | ((index >= own) & (index <= column))
            keys, values = list(work.keys), list(work.values)

            def attend(layer, q, k, v):
                k_bkd1, v_bk1d = k[:, 0, :, :, None], v[:, 0, :, None]
                dtype = keys[layer].dtype
                keys[layer] = jax.lax.dynamic_update_slice(
                    keys[layer], k_bkd1.astype(dtype), (0, 0, 0, column)
                )
                values[layer] = jax.lax.dynamic_update_slice(
                    values[layer], v_bk1d.astype(dtype), (0, 0, column, 0)
                )
                trunk = _trunk_attention(q[:, 0], pool, layer, batch.tiles)
                out = _step_attention(q[:, 0], keys[layer], values[layer], seen_bt, trunk)
                return out[:, None].astype(q.dtype)

            out_bsd = model.run_unrolled(
                choice.token_b[:, None], position_b[:, None], attend, blocks
            )
            # A row that is done keeps the state it had.
            kept_bd = jnp.where(live_b[:, None], out_bsd[:, 0], hidden_bd)
            return kept_bd, kv_cache.Workspace(tuple(keys), tuple(values))

        hidden_bd, work = jax.lax.cond(
            jnp.any(live_b), advance, lambda work: (hidden_bd, work), work
        )
        return step + 1, hidden_bd, work, live_b, made

    none = Sampled(
        counts=jnp.zeros(b, jnp.int32),
        ids=jnp.zeros((b, s), jnp.int32),
        logprobs=jnp.zeros((b, s), jnp.float32),
        entropies=jnp.zeros((b, s), jnp.float32),
        raw_logprobs=jnp.zeros((b, s), jnp.float32),
    )
    start = (jnp.int32(0), pool.hidden[batch.source], work, batch.limit > 0, none)

    def unfinished(carry):
        step, _, _, live_b, _ = carry
        return (step < s) & (jnp.sum(live_b) > batch.enough)

    steps, hidden_bd, work, _, made = jax.lax.while_loop(unfinished, body, start)
    pool = _write_back(pool, work, batch, own, steps)
    return pool._replace(hidden=pool.hidden.at[batch.place].set(hidden_bd)), work, made


def _write_back(pool, work, batch, own, steps):
    s = batch.slots.shape[1]

    def columns(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, own + batch.offset, s, axis)

    keys = jnp.stack([columns(k, 3).transpose(0, 3, 1, 2) for k in work.keys])
    values = jnp.stack([columns(v, 2).transpose(0, 2, 1, 3) for v in work.values])
    return kv_cache.write(pool, keys, values, batch.slots, steps)


def _attention(
    q_bshd: jax.Array, k_btkd: jax.Array, v_btkd: jax.Array, seen_bst: Bool[Array, "b s t"]
) -> jax.Array:
    """Plain attention of many tokens; keys are not repeated."""
    b, s, h, d = q_bshd.shape
    kv = k_btkd.shape[2]
    q_bskgd = q_bshd.reshape(b, s, kv, h // kv, d) * (d**-0.5)
    scores_bkgst = jnp.einsum(
        "bskgd,btkd->bkgst", q_bskgd, k_btkd, preferred_element_type=jnp.float32
    )
    scores_bkgst = jnp.where(seen_bst[:, None, None], scores_bkgst, -jnp.inf)
    weights_bkgst = jax.nn.softmax(scores_bkgst, axis=-1).astype(q_bshd.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights_bkgst, v_btkd).reshape(b, s, h, d)


class _Part(NamedTuple):
    """Attention over a part of the past, before its normalisation; all float32.

    Attributes:
      most: [b, k, g], largest score.
      total: [b, k, g], sum of exp(score - most).
      mixed: [b, k, g, d], values weighted by exp(score - most).
    """

    most: jax.Array
    total: jax.Array
    mixed: jax.Array


def _step_attention(q_bhd, k_bkdt, v_bktd, seen_bt, trunk: _Part) -> jax.Array:
    """Attention of one token a row to its own past, merged with that to its trunk."""
    b, h, d = q_bhd.shape
    kv = v_bktd.shape[1]
    q_bkgd = q_bhd.reshape(b, kv, h // kv, d) * (d**-0.5)
    scores_bkgt = jnp.einsum(
        "bkgd,bkdt->bkgt", q_bkgd, k_bkdt.astype(q_bhd.dtype), preferred_element_type=jnp.float32
    )
    scores_bkgt = jnp.where(seen_bt[:, None, None], scores_bkgt, -jnp.inf)
    most_bkg = jnp.maximum(scores_bkgt.max(-1), trunk.most)
    weights_bkgt = jnp.exp(scores_bkgt - most_bkg[..., None])
    scale_bkg = jnp.exp(trunk.most - most_bkg)
    total_bkg = weights_bkgt.sum(-1) + scale_bkg * trunk.total
    mixed_bkgd = jnp.einsum(
        "bkgt,bktd->bkgd", weights_bkgt.astype(q_bhd.dtype), v_bktd.astype(q_bhd.dtype)
    )
    mixed_bkgd = mixed_bkgd + scale_bkg[..., None] * trunk.mixed
    return (mixed_bkgd / total_bkg[..., None]).reshape(b, h, d)


def _trunk_attention(q_bhd, pool: kv_cache.Pool, layer: int, tiles: Tiles) -> _Part:
    """Attention of one token a row to its trunk, each tile read once."""
    b, h, d = q_bhd.shape
    kv = pool.keys.shape[2]
    group = min(GROUP, b)
    q_bkgd = q_bhd.reshape(b, kv, h // kv, d) * (d**-0.5)

    def one_tile(index, part):
        k_tkd, v_tkd = (
            kv_cache.pages_at(x, layer, tiles.pages[index]).astype(q_bhd.dtype)
            for x in (pool.keys, pool.values)
        )
        first, beyond = tiles.first[index], tiles.beyond[index]

        def one_group(number, part):
            wanted = first + number * group
            at = jnp.minimum(wanted, b - group)
            rows = at + jnp.arange(group)
            # The last group may begin before its first row; those rows have had their turn.
            mine_rkg = ((rows >= wanted) & (rows < beyond))[:, None, None]
            q_rkgd = jax.lax.dynamic_slice_in_dim(q_bkgd, at, group)
            old = _Part(*(jax.lax.dynamic_slice_in_dim(x, at, group) for x in part))
            scores_rkgt = jnp.einsum(
                "rkgd,tkd->rkgt", q_rkgd, k_tkd, preferred_element_type=jnp.float32
            )
            most = jnp.maximum(old.most, scores_rkgt.max(-1))
            weights_rkgt = jnp.exp(scores_rkgt - most[..., None])
            kept = jnp.exp(old.most - most)
            mixed = jnp.einsum("rkgt,tkd->rkgd", weights_rkgt.astype(q_bhd.dtype), v_tkd)
            new = _Part(
                jnp.where(mine_rkg, most, old.most),
                jnp.where(mine_rkg, kept * old.total + weights_rkgt.sum(-1), old.total),
                jnp.where(mine_rkg[..., None], kept[..., None] * old.mixed + mixed, old.mixed),
            )
            return _Part(
                *(
                    jax.lax.dynamic_update_slice_in_dim(x, y, at, 0)
                    for x, y in zip(part, new, strict=True)
                )
            )

        groups = (beyond - first + group - 1) // group
        return jax.lax.fori_loop(0, groups, one_group, part)

    nothing = _Part(
        most=jnp.full(q_bkgd.shape[:3], -jnp.inf, jnp.float32),
        total=jnp.zeros(q_bkgd.shape[:3], jnp.float32),
        mixed=jnp.zeros(q_bkgd.shape, jnp.float32),
    )
    return jax.lax.fori_loop(0, tiles.number, one_tile, nothing)
