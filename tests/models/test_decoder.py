"""The decoder: a packed tree is scored as its trajectories one by one."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax import packing
from bpo_jax.models import decoder, token_logprobs
from bpo_jax.models.config import DecoderConfig, RopeScaling
from tests import trees as random_trees

QWEN = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
LLAMA = dataclasses.replace(
    QWEN,
    qkv_bias=False,
    tie_embeddings=False,
    head_dim=12,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    ),
)


@functools.cache
def build(config):
    """A decoder whose biases and norms are random too, so that a wrong one shows."""
    graphdef, params = decoder.init(config, seed=0)
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    leaves = [x + 0.1 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return graphdef, jax.tree.unflatten(structure, leaves)


def objective(graphdef):
    """A weighted sum over trained tokens, and the log-prob of every token."""

    def total(params, batch):
        model = nnx.merge(graphdef, params)
        hidden = model(batch.tokens, batch.position, batch.subtree_end)
        parent = jnp.maximum(batch.parent, 0)[..., None]
        source = jnp.take_along_axis(hidden, parent, axis=1)
        logprob, entropy = token_logprobs(
            source.reshape(-1, source.shape[-1]), model.head_dv(), batch.tokens.reshape(-1)
        )
        logprob, entropy = (x.reshape(batch.tokens.shape) for x in (logprob, entropy))
        weight = batch.loss_mask * batch.coefficient
        return jnp.sum(weight * (batch.advantage * logprob + 0.1 * entropy)), logprob

    return jax.jit(jax.value_and_grad(total, has_aux=True))


compiled = functools.cache(objective)


def score(config, trees, weights, *, rows, row_length, buckets=()):
    """(log-probs by tree and action, gradient, loss) over all micro-batches."""
    graphdef, params = build(config)
    batches = packing.pack(trees, weights, rows=rows, row_length=row_length, buckets=buckets)
    run = compiled(graphdef)
    results = [run(params, jax.tree.map(jnp.asarray, b)) for b in batches]
    logprobs = packing.unpack(trees, batches, [r[0][1] for r in results])
    gradient = jax.tree.map(lambda *g: np.sum(g, axis=0), *[r[1] for r in results])
    return logprobs, gradient, sum(float(r[0][0]) for r in results)


def relative(x, y):
    return float(np.linalg.norm(np.asarray(x) - y) / max(np.linalg.norm(y), 1e-12))


@functools.cache
def forest():
    """Trees with nested forks, one of them longer than the rows it is packed into."""
    trees = [random_trees.random_tree(s, turns=5, fork_rate=0.5) for s in (1, 6)]
    return trees, [random_trees.random_weights(t, i) for i, t in enumerate(trees)]


@functools.cache
def one_by_one(config):
    """Log-probs and gradient with every trajectory as a tree of its own and plain attention."""
    flat = [packing.flatten(t, w) for t, w in zip(*forest(), strict=True)]
    chains = [c for cs, _ in flat for c in cs]
    weights = [w for _, ws in flat for w in ws]
    return score(
        dataclasses.replace(config, attention="dense"), chains, weights, rows=8, row_length=64
    )


@pytest.mark.parametrize("attention", ["dense", "chunked"])
@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_packed_trees_give_the_log_probs_and_gradients_of_flat_trajectories(config, attention):
    trees, weights = forest()
    config = dataclasses.replace(config, attention=attention)
    logprobs, gradient, _ = score(config, trees, weights, rows=2, row_length=160)
    flat_logprobs, flat_gradient, _ = one_by_one(dataclasses.replace(config, attention="auto"))
    flat = iter(flat_logprobs)
    for tree, found in zip(trees, logprobs, strict=True):
        order = {id(a): i for i, a in enumerate(tree.actions())}
        for path in tree.paths():
            for action, expected in zip(path, next(flat), strict=True):
                # Float32; sums in another order.
                np.testing.assert_allclose(found[order[id(action)]], expected, atol=1e-5)
    both = zip(*map(jax.tree.leaves_with_path, (gradient, flat_gradient)), strict=True)
    for (name, got), (_, expected) in both:
        assert relative(got, expected) < 1e-5, jax.tree_util.keystr(name)


@settings(max_examples=6)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0]), st.sampled_from([2, 64]), st.booleans())
def test_trees_with_contexts_of_their_own_give_what_their_contexts_give_one_by_one(
    seed, fresh_rate, vocab, split
):
    tree = random_trees.random_tree(seed, turns=5, fresh_rate=fresh_rate, vocab=vocab)
    weight = random_trees.random_weights(tree, seed)
    # The shortest row there is room in for any path of such a tree, or one that holds it whole.
    found, gradient, _ = score(QWEN, [tree], [weight], rows=2, row_length=64 if split else 256)
    chains, weights = packing.flatten(tree, weight)
    flat, flat_gradient, _ = score(
        dataclasses.replace(QWEN, attention="dense"), chains, weights, rows=8, row_length=64
    )
    expected = iter([numbers for chain in flat for numbers in chain])
    order = {id(a): i for i, a in enumerate(tree.actions())}
    for path in tree.paths():
        for action in path:
            # Float32; sums in another order.
            np.testing.assert_allclose(found[0][order[id(action)]], next(expected), atol=1e-5)
    assert next(expected, None) is None
    for got, wanted in zip(*map(jax.tree.leaves, (gradient, flat_gradient)), strict=True):
        assert relative(got, wanted) < 1e-5


def test_shorter_rows_give_the_same_loss_and_gradients():
    trees = [random_trees.random_tree(s, turns=5, fresh_rate=s % 2) for s in range(8)]
    weights = [random_trees.random_weights(t, i) for i, t in enumerate(trees)]
    shape = {"rows": 2, "row_length": 256}
    buckets = (128, 192)
    shapes = {b.tokens.shape for b in packing.pack(trees, weights, **shape, buckets=buckets)}
    assert len(shapes) > 1
    plain = score(QWEN, trees, weights, **shape)
    bucketed = score(QWEN, trees, weights, **shape, buckets=buckets)
    assert bucketed[2] == pytest.approx(plain[2], rel=1e-5)
    for got, expected in zip(*map(jax.tree.leaves, (bucketed[0], plain[0])), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    for got, expected in zip(*map(jax.tree.leaves, (bucketed[1], plain[1])), strict=True):
        assert relative(got, expected) < 1e-5


def test_a_tree_split_over_rows_gives_what_it_gives_whole():
    trees = [random_trees.random_tree(7, turns=5, fork_rate=0.6)]
    weights = [random_trees.random_weights(trees[0], 0)]
    whole = score(QWEN, trees, weights, rows=1, row_length=256)
    longest = max(packing.token_counts(c)[0] for c in packing.flatten(trees[0], weights[0])[0])
    assert packing.token_counts(trees[0])[0] > longest + 2
    split = score(QWEN, trees, weights, rows=2, row_length=longest + 2)
    for got, expected in zip(split[0][0], whole[0][0], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(split[1]), jax.tree.leaves(whole[1]), strict=True):
        assert relative(got, expected) < 1e-5


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat):
    trees = [random_trees.random_tree(0)]
    weights = [random_trees.random_weights(trees[0], 0)]
    plain = score(QWEN, trees, weights, rows=1, row_length=64)[1]
    again = score(dataclasses.replace(QWEN, remat=remat), trees, weights, rows=1, row_length=64)[1]
    for got, expected in zip(jax.tree.leaves(again), jax.tree.leaves(plain), strict=True):
        assert relative(got, expected) < 1e-6


def test_every_parameter_names_all_its_axes():
    _, shapes, axes = decoder.abstract(LLAMA)
    params = decoder.init(LLAMA, seed=0)[1]
    assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(
        lambda s: (s.shape, s.dtype), shapes
    )
    named = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    for shape, names in zip(jax.tree.leaves(shapes), named, strict=True):
        assert len(shape.shape) == len(names)
    assert all(names[0] == "layers" for names in axes["layers"].values())


def test_seeds_decide_the_parameters():
    one, same, other = (decoder.init(QWEN, seed=s)[1]["embedding"] for s in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"dtype": "float16"}, "expected float32 or bfloat16"),
        ({"remat": "some"}, "expected none, dots or full"),
    ],
)
def test_an_impossible_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(QWEN, **change)
