"""A prefix cache changes what is computed, never what comes out."""

from __future__ import annotations

import copy
import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax import packing
from bpo_jax.models import scoring
from tests import trees as random_trees
from tests.models.test_decoder import LLAMA, QWEN, build

LENGTH = 512


def pack(trees, rows=1, row_length=LENGTH):
    weights = [random_trees.random_weights(tree, 0) for tree in trees]
    (batch,) = packing.pack(trees, weights, rows=rows, row_length=row_length)
    return batch


def pruned(tree, rng, keep=0.5):
    """The same tree as it was before some of its branches were grown."""
    tree = copy.deepcopy(tree)
    for decision in tree.decisions():
        if len(decision.actions) > 1:
            kept = [a for a in decision.actions if rng.random() < keep]
            decision.actions = kept or decision.actions[:1]
    for action in tree.actions():
        if action.next is not None and rng.random() < 0.3:
            action.next, action.end = None, "truncated"
    return tree


def assert_same(got, expected, batch):
    valid = batch.subtree_end > np.arange(batch.tokens.shape[1])
    for x, y in zip(got, expected, strict=True):
        # Float32; sums in another order.
        np.testing.assert_allclose(np.asarray(x)[valid], np.asarray(y)[valid], atol=2e-5)


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_scoring_without_a_cache_is_the_forward_pass(config):
    graphdef, params = build(config)
    batch = pack([random_trees.random_tree(s, turns=5) for s in range(3)])
    expected = scoring.token_scores(graphdef, params, batch)
    logprob, entropy, cache = scoring.score(graphdef, params, batch)
    assert_same((logprob, entropy), expected, batch)
    assert scoring.new_tokens(batch, cache) == 0


@given(seed=st.integers(0, 10_000), attention=st.sampled_from(["dense", "chunked"]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_tree_that_grew_anywhere_scores_as_from_scratch(seed, attention):
    graphdef, params = build(dataclasses.replace(QWEN, attention=attention))
    rng = np.random.default_rng(seed)
    grown = [random_trees.random_tree(seed + s, turns=4, fork_rate=0.4) for s in range(2)]
    small = pack([pruned(tree, rng) for tree in grown])
    batch = pack(grown[::-1])
    _, _, cache = scoring.score(graphdef, params, small)
    logprob, entropy, extended = scoring.score(graphdef, params, batch, cache)
    fresh = scoring.token_scores(graphdef, params, batch)
    assert_same((logprob, entropy), fresh, batch)
    # Everything that was there has been found again, and what was found was not computed.
    count = [int(np.sum(b.subtree_end > np.arange(LENGTH))) for b in (small, batch)]
    assert scoring.new_tokens(batch, cache) <= count[1]
    assert scoring.new_tokens(small, extended) == 0
    again = scoring.score(graphdef, params, batch, extended)
    assert_same(again[:2], fresh, batch)


def test_only_the_tokens_of_a_new_branch_are_computed():
    graphdef, params = build(QWEN)
    tree = random_trees.random_tree(3, roots=2, turns=6, fork_rate=0.0)
    short = copy.deepcopy(tree)
    short.root.actions.pop()
    before, after = pack([short]), pack([tree])
    _, _, cache = scoring.score(graphdef, params, before)
    counts = [int(np.sum(b.subtree_end > np.arange(LENGTH))) for b in (before, after)]
    assert 0 < scoring.new_tokens(after, cache) <= counts[1] - counts[0]


def test_what_the_cache_holds_is_really_used():
    """With other parameters the cached tokens keep their old scores: they were not computed."""
    graphdef, params = build(QWEN)
    batch = pack([random_trees.random_tree(3, turns=6)])
    logprob, _, cache = scoring.score(graphdef, params, batch)
    other = jax.tree.map(lambda x: x * 1.5, params)
    again, _, _ = scoring.score(graphdef, other, batch, cache)
    np.testing.assert_array_equal(again, logprob)


def test_a_longer_row_and_equal_beginnings_of_siblings_are_no_hindrance():
    graphdef, params = build(QWEN)
    tree = random_trees.random_tree(5, roots=2, turns=4)
    first, second = tree.root.actions
    second.token_ids[: len(first.token_ids)] = first.token_ids[: len(second.token_ids)]
    small = pack([tree], row_length=256)
    batch = pack([random_trees.random_tree(6), tree])
    _, _, cache = scoring.score(graphdef, params, small)
    got = scoring.score(graphdef, params, batch, cache)[:2]
    assert_same(got, scoring.token_scores(graphdef, params, batch), batch)


def test_another_number_of_rows_is_refused():
    graphdef, params = build(QWEN)
    _, _, cache = scoring.score(graphdef, params, pack([random_trees.random_tree(0)]))
    with pytest.raises(ValueError, match="the cache has 1 rows, the batch 2"):
        scoring.score(graphdef, params, pack([random_trees.random_tree(0)], rows=2), cache)


SHARDED = """
import dataclasses, jax, jax.numpy as jnp, numpy as np
from bpo_jax import packing
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.models import decoder, partition, scoring
from tests.models import test_scoring as t
from tests.models.test_decoder import relative

trees = [t.random_trees.random_tree(s, turns=6, fork_rate=0.4) for s in range(8)]
batch = t.pack(trees, rows=4, row_length=640)
weight = np.random.default_rng(0).normal(size=(2, *batch.tokens.shape)).astype(np.float32)
weight *= batch.subtree_end > np.arange(640)
one_key_head = dataclasses.replace(t.LLAMA, num_kv_heads=1)
meshes = [(t.QWEN, {"data": 2, "fsdp": 2}), (t.QWEN, {"fsdp": 2, "tensor": 2})]
for config, sizes in (*meshes, (one_key_head, {"tensor": 4})):
    graphdef, params = t.build(config)

    def total(params, batch, mesh):
        scores = scoring.token_scores(graphdef, params, batch, chunk=128, mesh=mesh)
        return sum(jnp.sum(w * x) for w, x in zip(weight, scores)), scores

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=2)
    grad, scores = run(params, batch, None)
    _, shapes, axes = decoder.abstract(config)
    mesh = mesh_lib.make_mesh(**{"fsdp": 1} | sizes, devices=jax.devices()[:4])
    placed = jax.device_put(params, partition.param_shardings(mesh, shapes, axes))
    rows = jax.device_put(batch, mesh_lib.batch_sharding(mesh))
    got_grad, got = run(placed, rows, mesh)
    t.assert_same(got, scores, batch)
    pairs = zip(jax.tree.leaves_with_path(got_grad), jax.tree.leaves(grad))
    for (name, x), y in pairs:
        assert relative(x, np.asarray(y)) < 1e-5, (sizes, name)
    _, _, cache = scoring.score(graphdef, placed, batch, mesh=mesh)
    assert scoring.new_tokens(batch, cache) == 0
    print(config.num_kv_heads, sizes, "ok")
"""


@pytest.mark.slow
def test_every_mesh_gives_the_scores_and_gradients_of_one_device():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", SHARDED], env=os.environ | flags, capture_output=True, text=True,
        timeout=600, cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ok") == 3
