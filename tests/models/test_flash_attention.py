"""The TPU kernels, interpreted on the CPU, compute what the dense reference does."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.models import flash_attention, visibility
from bpo_jax.models.live_pairs import Pairs
from bpo_jax.models.tree_attention import tree_attention

ROWS, T, BLOCK = 2, 460, 128
"""Four blocks, the last one not full."""

EXAMPLES = settings(max_examples=6)


def random_ends(seed, fork_rate, tree_rate, padding):
    """A row of trees: each token continues the one before it, forks from an ancestor, or starts a
    tree; the last `padding` tokens belong to none."""
    rng = np.random.default_rng(seed)
    end = np.arange(T)
    path = []
    for token in range(T - padding):
        kept = len(path)
        if rng.random() < tree_rate:
            kept = 0
        elif path and rng.random() < fork_rate:
            kept = int(rng.integers(1, len(path) + 1))
        end[path[kept:]] = token
        path = path[:kept] + [token]
    end[path] = T - padding
    return end


def rows_of_trees():
    """Chains (nothing forks), stars of single tokens and nested forks, with and without padding."""
    row = st.builds(
        random_ends,
        seed=st.integers(0, 2**16),
        fork_rate=st.sampled_from([0.0, 0.01, 0.1, 0.9]),
        tree_rate=st.sampled_from([0.0, 0.01]),
        padding=st.sampled_from([0, 1, 90, 250]),
    )
    return st.lists(row, min_size=ROWS, max_size=ROWS).map(lambda x: np.stack(x).astype(np.int32))


def inputs(shape, seed=0, queries=T, dtype=np.float32):
    heads, kv_heads, d = shape
    rng = np.random.default_rng(seed)
    shapes = [(ROWS, queries, heads, d), *[(ROWS, T, kv_heads, d)] * 2, (ROWS, queries, heads, d)]
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return q * 3, k, v, cotangent


def attend(q, k, v, index, end):
    return flash_attention.attend(q, k, v, index, end, block_q=BLOCK, block_k=BLOCK, interpret=True)


def dense(q, k, v, index, end):
    return tree_attention(q, k, v, end, index, implementation="dense")


@functools.partial(jax.jit, static_argnums=0)
def output_and_gradients(attention, q, k, v, cotangent, index, end):
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, index, end), q, k, v)
    return out, *pull(cotangent)


def relative(x, y):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


def assert_equal_to_dense(qkvc, index, end):
    got = output_and_gradients(attend, *qkvc, index, end)
    expected = output_and_gradients(dense, *qkvc, index, end)
    # Float32: the order of sums differs, and weights are computed again backwards.
    assert relative(got[0], expected[0]) < 1e-5
    for x, y in zip(got[1:], expected[1:], strict=True):
        assert relative(x, y) < 1e-4


@pytest.mark.parametrize("shape", [(4, 2, 64), (2, 2, 128)], ids=["grouped", "one head each"])
@EXAMPLES
@given(end=rows_of_trees())
def test_output_and_gradients_are_those_of_dense(shape, end):
    assert_equal_to_dense(inputs(shape), visibility.all_tokens(jnp.asarray(end)), end)


@EXAMPLES
@given(end=rows_of_trees(), seed=st.integers(0, 2**16))
def test_some_queries_attend_as_among_all(end, seed):
    rng = np.random.default_rng(seed)
    index = np.full((ROWS, 200), -1, np.int32)
    for row, count in zip(index, (200, 150), strict=True):
        row[:count] = np.sort(rng.choice(T, count, replace=False))
    assert_equal_to_dense(inputs((3, 1, 64), queries=200), index, end)


def test_bfloat16_stays_close_to_float32():
    end = np.stack([random_ends(seed, 0.01, 0.01, 30) for seed in range(ROWS)])
    index = visibility.all_tokens(jnp.asarray(end))
    low = inputs((4, 2, 64), dtype=jnp.bfloat16)
    got = output_and_gradients(attend, *low, index, end)
    high = [x.astype(jnp.float32) for x in low]
    for x, y in zip(got, output_and_gradients(dense, *high, index, end), strict=True):
        assert x.dtype == jnp.bfloat16
        # Eight bits of mantissa in weights and output.
        assert relative(x, y) < 1e-2


def islands():
    """Row 0: a tree in block 0, two blocks of nothing, a tree in block 3. Row 1: nothing."""
    end = np.tile(np.arange(T), (ROWS, 1)).astype(np.int32)
    end[0, :BLOCK] = BLOCK
    end[0, 3 * BLOCK :] = T
    return end


def test_what_no_one_sees_is_not_read():
    end = islands()
    index = visibility.all_tokens(jnp.asarray(end))
    clean = inputs((4, 2, 64))
    unseen = np.ones((ROWS, T, 1, 1), bool)
    unseen[0, :BLOCK] = unseen[0, 3 * BLOCK :] = False
    dirty = [jnp.where(unseen, jnp.nan, x) for x in clean]
    expected = output_and_gradients(attend, *clean, index, end)
    for x, y in zip(output_and_gradients(attend, *dirty, index, end), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_padding_gives_zero_and_receives_no_gradient():
    end = np.stack([random_ends(0, 0.1, 0.01, 90), np.arange(T)])
    results = output_and_gradients(
        attend, *inputs((4, 2, 64)), visibility.all_tokens(jnp.asarray(end)), end
    )
    for x in results:
        assert np.asarray(x)[0, : T - 90].any()
        assert not np.asarray(x)[0, T - 90 :].any()
        assert not np.asarray(x)[1].any()


@EXAMPLES
@given(end=rows_of_trees())
def test_exactly_the_pairs_in_which_something_is_seen_are_listed(end):
    end = np.pad(end, ((0, 0), (0, 4 * BLOCK - T)))  # padding keys end before they begin
    index = np.arange(4 * BLOCK)
    seen = visibility.visible(index[:, None], index, end[:, None, :])
    needed = np.asarray(seen).reshape(ROWS, 4, BLOCK, 4, BLOCK).any(axis=(2, 4))
    live = visibility.live_blocks(
        visibility.all_tokens(jnp.asarray(end)), jnp.asarray(end), block_q=BLOCK, block_k=BLOCK
    )
    for by_block, expected in ((live, needed), (live.swapaxes(1, 2), needed.swapaxes(1, 2))):
        order = Pairs(major=4, minor=4)
        pairs, count = order.listed(by_block)
        steps = [tuple(map(int, order.at(pairs, n))) for n in range(int(count))]
        assert steps == [tuple(x) for x in np.argwhere(expected).tolist()]
        flags = [tuple(map(bool, order.ends(pairs, n))) for n in range(int(count))]
        for _, block in itertools.groupby(range(len(steps)), key=lambda n: steps[n][:2]):
            first, *_, last = [*block] * 2
            assert [n for n in range(first, last + 1) if flags[n][0]] == [first]
            assert [n for n in range(first, last + 1) if flags[n][1]] == [last]


def test_where_nothing_is_seen_the_first_pair_keeps_the_grid_from_being_empty():
    order = Pairs(major=3, minor=2)
    pairs, count = order.listed(jnp.zeros((2, 3, 2), bool))
    assert count == 1
    assert tuple(map(int, order.at(pairs, 0))) == (0, 0, 0)
    assert all(order.ends(pairs, 0))


def test_rows_that_no_one_list_can_hold_are_attended_one_after_the_other(monkeypatch):
    end = np.stack([random_ends(seed, 0.1, 0.01, 30) for seed in range(ROWS)])
    index = visibility.all_tokens(jnp.asarray(end))
    q, k, v, _ = inputs((2, 1, 64))
    expected = attend(q, k, v, index, end)
    monkeypatch.setattr(flash_attention, "LIST_LIMIT", 16)
    np.testing.assert_allclose(attend(q, k, v, index, end), expected, rtol=1e-6)


def test_a_row_that_no_list_can_hold_is_refused(monkeypatch):
    monkeypatch.setattr(flash_attention, "LIST_LIMIT", 15)
    end = np.tile(np.arange(T), (ROWS, 1))
    q, k, v, _ = inputs((2, 1, 64))
    with pytest.raises(ValueError, match="460 queries and 460 keys are 16 pairs of blocks, more"):
        attend(q, k, v, end, end)


def test_a_block_that_is_no_multiple_of_the_lanes_is_refused():
    end = np.tile(np.arange(T), (ROWS, 1))
    q, k, v, _ = inputs((2, 1, 64))
    with pytest.raises(ValueError, match="block_k=200: expected a multiple of 128"):
        flash_attention.attend(q, k, v, end, end, block_k=200, interpret=True)
