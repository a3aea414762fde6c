"""A step that cannot be made leaves the policy as it was and counts nowhere."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import packing
from bpo_jax.learner import cloning, mesh
from bpo_jax.models import decoder
from bpo_jax.tree import Action, Decision, Tree

CONFIG = decoder.DecoderConfig(
    vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=8, max_positions=128,
)  # fmt: skip


def batch(weight):
    ids = np.array([3, 4, 5], np.int32)
    zeros = np.zeros(3, np.float32)
    action = Action(token_ids=ids, logprobs=zeros, entropies=zeros, text="", end="done")
    tree = Tree(task_id="t", root=Decision(context_ids=ids, actions=[action]))
    weights = packing.Weights(advantage=np.ones(1), coefficient=np.array([float(weight)]))
    [made] = packing.pack([tree], [weights], rows=1, row_length=128)
    return made


@pytest.fixture(scope="module")
def cloner():
    return cloning.make(
        CONFIG, learning_rate=0.01, warmup=1, updates=4, context_weight=0.0, chunk=64,
        mesh=mesh.make_mesh(devices=jax.devices()[:1]),
    )  # fmt: skip


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool(jnp.array_equal(x, y, equal_nan=True)) for x, y in pairs)


@pytest.mark.parametrize("case", ["fine", "no weight", "not finite"])
def test_a_step_that_cannot_be_made_changes_nothing(cloner, case):
    _, params = decoder.init(CONFIG, 0)
    if case == "not finite":
        params["final_norm"] = jnp.full_like(params["final_norm"], jnp.nan)
    before = jax.device_get(cloner.start(params))
    state, sums = cloner.step(cloner.start(params), cloner.put(batch(case != "no weight")))
    numbers = cloning.means([sums])
    assert same(state, before) == (case != "fine")
    assert numbers["skipped"] == (case != "fine")
    assert math.isfinite(numbers["loss"]) == (case == "fine")


def test_skipped_steps_do_not_spoil_the_means_of_the_others():
    fine, skipped = jnp.array([6.0, 3.0, 4.0, 2.0, 0.0]), jnp.array([0.0, 0.0, 0.0, 0.0, 1.0])
    numbers = cloning.means([fine, skipped])
    assert numbers["loss"] == numbers["loss/action"] == 2.0
    assert numbers["probability"] == pytest.approx(math.exp(-2))
    assert numbers["skipped"] == 1
