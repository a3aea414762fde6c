"""Schedules, clipping and what weight decay leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax.learner import optimizer as optimizer_lib
from bpo_jax.learner.optimizer import OptimizerSettings


def test_warm_up_is_linear_and_its_first_update_moves():
    rate = optimizer_lib.learning_rate(OptimizerSettings(learning_rate=1.0, warmup=4))
    assert [float(rate(i)) for i in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_the_cosine_starts_after_warm_up_and_ends_at_the_final_fraction():
    settings = OptimizerSettings(
        learning_rate=2.0, warmup=2, schedule="cosine", total=12, final_fraction=0.1
    )
    rate = optimizer_lib.learning_rate(settings)
    assert float(rate(2)) == pytest.approx(2.0)
    assert float(rate(7)) == pytest.approx(2.0 * 0.55)
    assert float(rate(12)) == pytest.approx(0.2)
    assert float(rate(100)) == pytest.approx(0.2)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="expected one of constant, cosine"):
        optimizer_lib.learning_rate(OptimizerSettings(learning_rate=1.0, schedule="linear"))


def test_weight_decay_leaves_norms_and_biases_alone():
    params = {"layers": {"q": jnp.ones((2, 3, 3)), "q_bias": jnp.ones((2, 3)), "norm": jnp.ones(3)}}
    transform = optimizer_lib.make(
        OptimizerSettings(learning_rate=0.5, weight_decay=0.1, max_grad_norm=0.0)
    )
    zero = {"layers": {name: jnp.zeros_like(x) for name, x in params["layers"].items()}}
    updates, _ = transform.update(zero, transform.init(params), params)
    np.testing.assert_allclose(updates["layers"]["q"], -0.05, rtol=1e-6)
    assert not updates["layers"]["q_bias"].any()
    assert not updates["layers"]["norm"].any()


def test_the_state_has_the_same_shape_whatever_the_settings():
    params = {"w": jnp.zeros(2)}
    plain = OptimizerSettings(learning_rate=0.1, max_grad_norm=0.0)
    full = OptimizerSettings(learning_rate=0.1, weight_decay=0.1, warmup=3)
    structures = [jax.tree.structure(optimizer_lib.make(s).init(params)) for s in (plain, full)]
    assert structures[0] == structures[1]


def test_the_first_step_of_adam_has_the_size_of_the_learning_rate():
    params = {"w": jnp.zeros(2)}
    transform = optimizer_lib.make(OptimizerSettings(learning_rate=0.1, max_grad_norm=1.0))
    updates, _ = transform.update({"w": jnp.asarray([30.0, -40.0])}, transform.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1, 0.1], rtol=1e-5)
