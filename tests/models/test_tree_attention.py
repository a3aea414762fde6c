"""Block-skipping attention computes what the dense reference does, and skips what it should."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import packing
from bpo_jax.models import chunked_attention, visibility
from bpo_jax.models.tree_attention import tree_attention
from tests import trees as random_trees


def chain(t):
    return np.full((1, t), t)


def star(t):
    """A prompt of four tokens and branches of three below it."""
    end = np.minimum(4 + 3 * ((np.arange(t) - 4) // 3 + 1), t)
    end[:4] = t
    return end[None]


def nested(t):
    """Every token above the middle has everything below it, the others only themselves."""
    return np.where(np.arange(t) < t // 2, t, np.arange(t) + 1)[None]


def padding(t):
    """A chain that fills a third of the row."""
    return np.where(np.arange(t) < t // 3, t // 3, np.arange(t))[None]


def packed_trees(t):
    """Two rows of several random trees with forks and a padded end."""
    trees = [random_trees.random_tree(seed, turns=5) for seed in range(8)]
    weights = [random_trees.random_weights(tree, 0) for tree in trees]
    return packing.pack(trees, weights, rows=2, row_length=t)[0].subtree_end


SHAPES = [chain, star, nested, padding, packed_trees]


def seen(end_bt):
    index = np.arange(end_bt.shape[1])
    return (index <= index[:, None]) & (index[:, None] < end_bt[:, None, :])


def by_hand(q, k, v, end_bt):
    """Softmax attention one query at a time, float64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(seen(end_bt)[b, i])
        if len(keys):
            scores = k[b, keys, h // group] @ q[b, i, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights @ v[b, keys, h // group] / weights.sum()
    return out


def inputs(end_bt, heads=4, kv_heads=2, size=8, seed=0):
    rng = np.random.default_rng(seed)
    b, t = end_bt.shape
    shapes = [(b, t, heads, size), (b, t, kv_heads, size), (b, t, kv_heads, size)]
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return q * 3, k, v, jnp.asarray(end_bt, jnp.int32)


def relative(x, y):
    return float(np.linalg.norm(np.asarray(x) - y) / max(np.linalg.norm(y), 1e-30))


@functools.partial(jax.jit, static_argnames=("implementation", "block"))
def attend(q, k, v, end, *, implementation, block=16):
    return tree_attention(q, k, v, end, implementation=implementation, block=block)


@functools.partial(jax.jit, static_argnames=("implementation", "block"))
def gradients(q, k, v, end, cotangent, *, implementation, block=16):
    def total(q, k, v):
        out = tree_attention(q, k, v, end, implementation=implementation, block=block)
        return jnp.sum(out * cotangent)

    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)


def cotangent_of(q):
    return np.random.default_rng(1).normal(size=q.shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ["dense", "chunked"])
def test_forward_is_softmax_attention_over_ancestors(shape, implementation):
    q, k, v, end = inputs(shape(60))
    out = attend(q, k, v, end, implementation=implementation)
    # Float32 sums of up to 60 terms against float64.
    assert relative(out, by_hand(q, k, v, np.asarray(end))) < 1e-5


@pytest.mark.parametrize("block", [16, 24, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunked_gradients_are_those_of_dense(shape, block):
    arguments = inputs(shape(60))
    arguments = (*arguments, cotangent_of(arguments[0]))
    chunked = gradients(*arguments, implementation="chunked", block=block)
    dense = gradients(*arguments, implementation="dense")
    for got, expected in zip(chunked, dense, strict=True):
        assert np.isfinite(got).all()
        assert relative(got, np.asarray(expected)) < 1e-4


@pytest.mark.parametrize("implementation", ["dense", "chunked"])
def test_padding_gives_zero_and_receives_no_gradient(implementation):
    q, k, v, end = inputs(padding(60))
    assert not np.asarray(attend(q, k, v, end, implementation=implementation))[:, 20:].any()
    for grad in gradients(q, k, v, end, cotangent_of(q), implementation=implementation):
        assert np.isfinite(grad).all()
        assert not np.asarray(grad)[:, 20:].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_the_blocks_in_which_something_is_seen_are_computed(shape):
    end = shape(96)
    end = jnp.asarray(end, jnp.int32)
    order, whole, count = chunked_attention.live_list(
        visibility.all_tokens(end), end, block_q=8, block_k=8
    )
    got = {(b, q, int(k)) for b, q in np.ndindex(*count.shape) for k in order[b, q, : count[b, q]]}
    pairs = seen(np.asarray(end)).reshape(len(end), 12, 8, 12, 8)
    blocks = pairs.any(axis=(2, 4))
    needed = {tuple(map(int, pair)) for pair in np.argwhere(blocks)}
    assert needed <= got
    # A key block is taken where its longest subtree reaches into the query block, so with whole
    # subtrees in view nothing is taken in vain.
    assert got == needed
    unmasked = {
        (b, q, int(k)) for b, q in np.ndindex(*count.shape) for k in order[b, q, : whole[b, q]]
    }
    assert unmasked == {tuple(map(int, pair)) for pair in np.argwhere(pairs.all(axis=(2, 4)))}


@pytest.mark.parametrize("implementation", ["dense", "chunked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_some_queries_give_what_they_give_among_all(shape, implementation):
    q, k, v, end = inputs(shape(60))
    cotangent = cotangent_of(q)
    rng = np.random.default_rng(0)
    index = np.full((len(end), 20), -1, np.int32)
    for row in index:
        row[:17] = np.sort(rng.choice(60, 17, replace=False))
    rows = np.arange(len(end))[:, None]
    kept = np.where(index[..., None, None] >= 0, cotangent[rows, index], 0)

    def out(q, k, v, index=None):
        return tree_attention(q, k, v, end, index, implementation=implementation, block=16)

    some, pull = jax.vjp(functools.partial(out, index=jnp.asarray(index)), q[rows, index], k, v)
    everything, pull_all = jax.vjp(out, q, k, v)
    sparse = np.zeros_like(cotangent)
    for b, i in np.argwhere(index >= 0):
        np.testing.assert_allclose(some[b, i], everything[b, index[b, i]], atol=1e-5)
        sparse[b, index[b, i]] = kept[b, i]
    assert not np.asarray(some)[index < 0].any()
    pairs = zip(pull(jnp.asarray(kept)), pull_all(jnp.asarray(sparse)), strict=True)
    for got, expected in list(pairs)[1:]:
        assert relative(got, np.asarray(expected)) < 1e-5


def test_dense_refuses_scores_it_could_not_hold():
    t = 32_768
    shapes = [jax.ShapeDtypeStruct((1, t, 9, 64), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((1, t, 3, 64), jnp.float32)] * 2
    end = jax.ShapeDtypeStruct((1, t), jnp.int32)
    with pytest.raises(ValueError, match="36 GiB of scores; use attention='chunked'"):
        jax.eval_shape(functools.partial(tree_attention, implementation="dense"), *shapes, end)


def test_bfloat16_stays_close_to_float32():
    q, k, v, end = inputs(star(96))
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out = tree_attention(*low, end, implementation="chunked", block=32)
    assert out.dtype == jnp.bfloat16
    # Eight bits of mantissa in inputs, weights and output.
    assert relative(out.astype(jnp.float32), by_hand(q, k, v, np.asarray(end))) < 2e-2


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="expected auto, dense, chunked, flash"):
        tree_attention(*inputs(chain(4)), implementation="sparse")


def test_head_counts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        tree_attention(*inputs(chain(4), heads=3))
