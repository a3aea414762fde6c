"""The critic in the learner: what it reads, what its loss changes, that it learns."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from bpo_jax import packing
from bpo_jax.learner import update as update_lib
from bpo_jax.learner.loss import LossSettings
from bpo_jax.learner.optimizer import OptimizerSettings
from bpo_jax.models import decoder
from tests.learner.test_update import CONFIG, make_tree

VALUED = dataclasses.replace(CONFIG, value_head=True)


def make_learner(**changes):
    settings = {
        "loss": LossSettings(value_weight=0.5),
        "optimizer": OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.0),
        "chunk": 16,
    } | changes
    return update_lib.make(VALUED, **settings)


@pytest.fixture(scope="module")
def learner():
    return make_learner()


def make_state(learner):
    params = decoder.init(VALUED, 0)[1]
    # As if it had been trained: a head of zeros says the same everywhere.
    params["value"] = jax.random.normal(jax.random.key(1), params["value"].shape)
    return learner.start(learner.place(params))


def make_batches(*, policy: float):
    """Three trees, with targets for the critic; what actions count is scaled by `policy`."""
    rng = np.random.default_rng(0)
    trees = [make_tree(seed) for seed in range(3)]
    weights = []
    for tree in trees:
        actions, decisions = len(tree.actions()), len(tree.decisions())
        weights.append(
            packing.Weights(
                advantage=rng.normal(size=actions),
                coefficient=np.full(actions, policy),
                value_target=rng.normal(size=decisions),
                value_prediction=np.zeros(decisions),
                value_weight=np.ones(decisions),
            )
        )
    return trees, packing.pack(trees, weights, rows=2, row_length=32)


def changed(before, after):
    """Names of the parameters that are not what they were."""
    flat = jax.tree_util.tree_flatten_with_path
    pairs = zip(flat(before)[0], flat(after)[0], strict=True)
    return {p[0].key for (p, x), (_, y) in pairs if not np.array_equal(x, y)}


def test_a_value_is_what_the_head_says_of_all_that_was_read_before_the_action(learner):
    trees, batches = make_batches(policy=1.0)
    params = make_state(learner).params
    said = [learner.values(params, learner.put(b)) for b in batches]
    for tree, per_action in zip(trees, packing.unpack(trees, batches, said), strict=True):
        values = packing.first_of_each_decision(tree, per_action)
        for path in tree.paths():
            weight = packing.Weights(advantage=np.zeros(len(path)), coefficient=np.ones(len(path)))
            # One sequence alone, with nothing after the decision but one action.
            chain = packing.flatten(
                tree,
                packing.Weights(
                    advantage=np.zeros(len(tree.actions())),
                    coefficient=np.ones(len(tree.actions())),
                ),
            )[0][list(map(id, tree.leaves())).index(id(path[-1]))]
            (alone,) = packing.pack([chain], [weight], rows=1, row_length=32)
            numbers = packing.unpack(
                [chain], [alone], [learner.values(params, learner.put(alone))]
            )[0]
            found = packing.first_of_each_decision(chain, numbers)
            decisions = [d for d in tree.decisions() if any(a in d.actions for a in path)]
            order = list(map(id, tree.decisions()))
            np.testing.assert_allclose(
                found, values[[order.index(id(d)) for d in decisions]], atol=1e-5
            )


def test_the_critics_loss_changes_its_head_alone(learner):
    _, batches = make_batches(policy=0.0)
    state = make_state(learner)
    before = jax.device_get(state.params)
    state, metrics = update_lib.update(learner, state, [batches])
    assert changed(before, jax.device_get(state.params)) == {"value", "value_bias"}
    assert metrics["loss/policy"] == 0.0


def test_it_changes_the_whole_model_where_that_is_asked_for():
    learner = make_learner(train_trunk=True)
    _, batches = make_batches(policy=0.0)
    state = make_state(learner)
    before = jax.device_get(state.params)
    state, _ = update_lib.update(learner, state, [batches])
    assert {"embedding", "layers", "value"} <= changed(before, jax.device_get(state.params))


def test_the_critic_learns_its_targets(learner):
    _, batches = make_batches(policy=0.0)
    state = make_state(learner)
    _, first = update_lib.update(learner, make_state(learner), [batches])
    _, last = update_lib.update(learner, state, [batches], epochs=100)
    # The last is a mean over all epochs.
    assert last["loss/value"] < 0.5 * first["loss/value"]
    assert last["diag/value_explained"] > first["diag/value_explained"]


SHARDED = """
import dataclasses, jax, numpy as np
from bpo_jax.learner import mesh as mesh_lib, update as update_lib
from bpo_jax.learner.loss import LossSettings
from tests.learner import test_critic as t
from tests.learner.test_update import assert_close, gradient

settings = LossSettings(value_weight=0.5, value_clip=0.5, ratio="action", importance_cap=1.2)
_, batches = t.make_batches(policy=1.0)
batches = [t.repeated(b, 4) for b in batches]
results = []
for mesh in (None, mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)):
    learner = t.make_learner(train_trunk=True, loss=settings, mesh=mesh)
    params = t.make_state(learner).params
    results.append(jax.device_get(gradient(learner, params, batches)))
assert_close(results[1][0], results[0][0], rtol=1e-5)
for name, value in results[0][1].items():
    np.testing.assert_allclose(results[1][1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
"""


def repeated(batch, rows):
    """The first row that many times, so that rows divide over a mesh."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return packing.TreeBatch(
        **{n: None if x is None else np.repeat(x[:1], rows, axis=0) for n, x in fields.items()}
    )


@pytest.mark.slow
def test_a_sharded_critic_with_ratios_of_actions_equals_an_unsharded_one():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True,
        timeout=600, cwd=pathlib.Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
