"""The update: micro-batches add up, nothing moves on a bad gradient, shards change nothing."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import packing
from bpo_jax.learner import update as update_lib
from bpo_jax.learner.loss import LossSettings
from bpo_jax.learner.optimizer import OptimizerSettings
from bpo_jax.models import decoder
from bpo_jax.tree import Action, Decision, Tree

CONFIG = decoder.DecoderConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_positions=64,
)  # fmt: skip


def make_tree(seed):
    """Two roots, the first forked in two."""
    rng = np.random.default_rng(seed)

    def ids(n):
        return rng.integers(1, 32, n).astype(np.int32)

    def action(n, then=None):
        end = None if then is not None else "done"
        logprobs = rng.normal(-3.0, 0.3, n).astype(np.float32)
        return Action(token_ids=ids(n), logprobs=logprobs, entropies=-logprobs, next=then, end=end)

    fork = Decision(context_ids=ids(3), actions=[action(3), action(2)])
    root = Decision(context_ids=ids(5), actions=[action(2, fork), action(4)])
    return Tree(task_id=str(seed), root=root)


def make_trees(count):
    trees = [make_tree(seed) for seed in range(count)]
    rng = np.random.default_rng(9)
    weights = [
        packing.Weights(
            advantage=rng.normal(size=len(tree.actions())),
            coefficient=rng.uniform(0.1, 1.0, len(tree.actions())),
        )
        for tree in trees
    ]
    return trees, weights


@functools.cache
def make_learner(**changes):
    """Cached: learners hold no state, and what takes time is to compile them."""
    settings = {
        "loss": LossSettings(),
        "optimizer": OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.0),
        "chunk": 16,
    } | changes
    return update_lib.make(CONFIG, **settings)


def make_state(learner, seed=0):
    return learner.start(learner.place(decoder.init(CONFIG, seed)[1]))


def assert_close(a, b, *, rtol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x - y) <= rtol * max(np.linalg.norm(y), 1e-8)


def gradient(learner, params, batches):
    total = learner.zeros(params)
    for batch in batches:
        total = learner.accumulate(params, total, learner.put(batch))
    return total


def test_micro_batches_add_up_to_one_batch():
    trees, weights = make_trees(4)
    learner = make_learner()
    params = make_state(learner).params
    whole = gradient(learner, params, packing.pack(trees, weights, rows=4, row_length=32))
    parts = packing.pack(trees, weights, rows=1, row_length=32)
    assert len(parts) > 1
    # float32 sums in another order.
    assert_close(gradient(learner, params, parts), whole, rtol=1e-5)


def test_a_step_is_the_same_however_the_batch_is_cut():
    trees, weights = make_trees(4)
    learner = make_learner()
    states = []
    for rows in (1, 4):
        batches = packing.pack(trees, weights, rows=rows, row_length=32)
        states.append(update_lib.update(learner, make_state(learner), [batches])[0])
    assert_close(states[0].params, states[1].params, rtol=1e-5)
    assert int(states[0].step) == 1


def test_log_probs_are_read_at_the_parent():
    trees, weights = make_trees(1)
    learner = make_learner()
    params = make_state(learner).params
    (batch,) = packing.pack(trees, weights, rows=1, row_length=32)
    scored = packing.unpack(trees, [batch], [learner.score(params, learner.put(batch))])[0]
    chains, chain_weights = packing.flatten(trees[0], weights[0])
    for path, chain, weight in zip(trees[0].paths(), chains, chain_weights, strict=True):
        # Mask nothing: a chain's shared actions have coefficient 0 but are still scored.
        (flat,) = packing.pack([chain], [weight], rows=1, row_length=32)
        alone = packing.unpack([chain], [flat], [learner.score(params, learner.put(flat))])[0]
        order = {id(action): i for i, action in enumerate(trees[0].actions())}
        for action, values in zip(path, alone, strict=True):
            np.testing.assert_allclose(scored[order[id(action)]], values, atol=1e-5)


def test_temperature_divides_the_logits():
    trees, weights = make_trees(1)
    (batch,) = packing.pack(trees, weights, rows=1, row_length=32)
    params = decoder.init(CONFIG, 0)[1]
    hot = make_learner(temperature=100.0)
    scored = packing.unpack(trees, [batch], [hot.score(params, hot.put(batch))])[0]
    # Nearly uniform over 32 ids.
    np.testing.assert_allclose(scored[0], -np.log(32.0), atol=0.01)


def test_on_policy_metrics_show_no_gap_and_no_clipping():
    trees, weights = make_trees(2)
    learner = make_learner()
    state = make_state(learner)
    batches = packing.pack(trees, weights, rows=1, row_length=32)
    on_policy = [
        dataclasses.replace(
            batch,
            behaviour_logprob=np.asarray(learner.score(state.params, learner.put(batch))),
        )
        for batch in batches
    ]
    _, metrics = update_lib.update(learner, state, [on_policy])
    assert metrics["rollout/logprob_gap"] < 1e-6
    assert metrics["diag/clip_fraction"] == 0.0
    assert metrics["diag/ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["diag/skipped"] == 0


def test_positive_advantages_become_likelier():
    trees, _ = make_trees(2)
    ones = [
        packing.Weights(advantage=np.ones(len(t.actions())), coefficient=np.ones(len(t.actions())))
        for t in trees
    ]
    learner = make_learner()
    state = make_state(learner)
    batches = packing.pack(trees, ones, rows=1, row_length=32)
    batch = batches[0]
    before = np.asarray(learner.score(state.params, learner.put(batch)))
    state, _ = update_lib.update(learner, state, [batches])
    after = np.asarray(learner.score(state.params, learner.put(batch)))
    assert (after - before)[batch.loss_mask > 0].mean() > 0


def test_epochs_and_minibatches_each_take_a_step():
    trees, weights = make_trees(2)
    learner = make_learner()
    minibatches = [
        packing.pack([tree], [weight], rows=1, row_length=32)
        for tree, weight in zip(trees, weights, strict=True)
    ]
    state, metrics = update_lib.update(learner, make_state(learner), minibatches, epochs=3)
    assert int(state.step) == 6
    assert metrics["diag/ess"] < 1.0  # later steps are off-policy


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was():
    trees, weights = make_trees(1)
    learner = make_learner()
    state = make_state(learner)
    before = jax.device_get(state)
    (batch,) = packing.pack(trees, weights, rows=1, row_length=32)
    broken = dataclasses.replace(batch, advantage=np.where(batch.loss_mask > 0, np.inf, 0.0))
    state, metrics = update_lib.update(learner, state, [[broken]])
    assert metrics["diag/skipped"] == 1
    assert_close(state, before, rtol=0.0)
    with pytest.raises(update_lib.NonFiniteGradients, match=r"update 7: .* skipped"):
        update_lib.check_finite(metrics, step=7)
    # The same state trains on.
    state, metrics = update_lib.update(learner, state, [[batch]])
    assert metrics["diag/skipped"] == 0
    assert int(state.step) == 1


def test_an_empty_minibatch_is_skipped_and_counted():
    learner = make_learner()
    state = make_state(learner)
    same, metrics = update_lib.update(learner, state, [[], []], epochs=2)
    assert same is state
    assert metrics["diag/skipped"] == 4
    with pytest.raises(update_lib.NothingToTrain, match="update 7"):
        update_lib.check_finite(metrics, step=7)
    trees, weights = make_trees(1)
    batches = packing.pack(trees, weights, rows=1, row_length=32)
    state, metrics = update_lib.update(learner, state, [[], batches])
    assert metrics["diag/skipped"] == 1
    assert int(state.step) == 1
    update_lib.check_finite(metrics, step=7)


def test_steady_state_compiles_nothing():
    trees, weights = make_trees(3)
    learner = make_learner()
    state = make_state(learner)
    functions = (learner.accumulate, learner.apply, learner.zeros)
    compiled = []
    for part in (slice(0, 3), slice(0, 1), slice(1, 3)):
        batches = packing.pack(trees[part], weights[part], rows=1, row_length=32)
        state, _ = update_lib.update(learner, state, [batches])
        compiled.append([function._cache_size() for function in functions])
    assert compiled[0] == compiled[1] == compiled[2]


SHARDED = """
import jax, numpy as np
from bpo_jax import packing
from bpo_jax.learner import mesh as mesh_lib, update as update_lib
from tests.learner import test_update as t

assert jax.device_count() == 8
trees, weights = t.make_trees(8)
batches = packing.pack(trees, weights, rows=4, row_length=32)
results = []
for mesh in (None, mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)):
    learner = t.make_learner(mesh=mesh)
    state = t.make_state(learner)
    total = t.gradient(learner, state.params, batches)
    total = jax.device_get(total)
    for _ in range(2):
        state, metrics = update_lib.update(learner, state, [batches])
    assert learner.apply._cache_size() == 1
    results.append((total, metrics["loss/policy"]))
q = state.params["layers"]["q"]
assert q.sharding.shard_shape(q.shape) == (2, 8, 2, 8), q.sharding.shard_shape(q.shape)
t.assert_close(results[1], results[0], rtol=1e-5)
"""


@pytest.mark.slow
def test_a_sharded_step_equals_an_unsharded_one():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr


def test_bfloat16_parameters_accumulate_in_float32():
    config = dataclasses.replace(CONFIG, param_dtype="bfloat16")
    learner = update_lib.make(
        config, loss=LossSettings(), optimizer=OptimizerSettings(learning_rate=1e-2)
    )
    params = decoder.init(config, 0)[1]
    grads, _ = learner.zeros(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
