"""The loss against numbers worked out by hand, and its gradient against finite differences."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax.learner import loss as loss_lib
from bpo_jax.learner.loss import LossSettings


def make_batch(*, advantage, coefficient, behaviour, reference=None, mask=None):
    def row(values):
        return jnp.asarray([values], jnp.float32)

    n = len(advantage)
    return types.SimpleNamespace(
        loss_mask=row(mask or [1.0] * n),
        advantage=row(advantage),
        coefficient=row(coefficient),
        behaviour_logprob=row(behaviour),
        reference_logprob=row(reference or [0.0] * n),
    )


def run(logprob, batch, entropy=None, **settings):
    entropy = [0.0] * len(logprob) if entropy is None else entropy
    return loss_lib.tree_loss(
        jnp.asarray([logprob], jnp.float32),
        jnp.asarray([entropy], jnp.float32),
        batch,
        LossSettings(**settings),
    )


def test_on_policy_the_loss_is_minus_the_weighted_sum_of_advantages():
    batch = make_batch(advantage=[2.0, -1.0], coefficient=[0.5, 0.25], behaviour=[-1.0, -2.0])
    loss, sums = run([-1.0, -2.0], batch)
    assert loss == pytest.approx(-(0.5 * 2.0 - 0.25 * 1.0))
    metrics = loss_lib.finish_metrics(sums)
    assert metrics["diag/ess"] == pytest.approx(1.0)
    assert metrics["diag/clip_fraction"] == 0.0
    assert metrics["rollout/logprob_gap"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 1.0, 1.1),  # inside the range
        (1.5, 1.0, 1.28),  # no gain beyond clip_high
        (1.5, -1.0, -1.5),  # what got worse is never clipped
        (0.5, 1.0, 0.5),
        (0.5, -1.0, -0.8),  # no gain beyond clip_low
        (9.0, -1.0, -3.0),  # the dual clip bounds a negative advantage
    ],
)
def test_clip(ratio, advantage, expected):
    settings = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    value = loss_lib.surrogate(jnp.float32(ratio), jnp.float32(advantage), settings)
    assert value == pytest.approx(expected)


def test_the_node_level_gradient_away_from_the_behaviour_policy_uses_one_advantage_a_token():
    # Copies with advantages +1 and -0.5 at ratio 1.3 would give a mean slope of -0.25; the node's
    # own advantage, +0.25, is clipped there, so its slope is 0.
    batch = make_batch(advantage=[0.25], coefficient=[1.0], behaviour=[0.0])
    slope = jax.grad(lambda x: run([x], batch)[0])(float(np.log(1.3)))
    assert slope == 0.0


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 1 + 0.5)],
)
def test_kl_estimators_have_their_formula_and_the_flow_weight(estimator, expected):
    batch = make_batch(advantage=[0.0], coefficient=[0.5], behaviour=[-1.0], reference=[-1.5])
    loss, sums = run([-1.0], batch, kl_weight=0.1, kl_estimator=estimator)
    assert loss == pytest.approx(0.1 * 0.5 * expected, rel=1e-6)
    assert sums["kl"] == pytest.approx(0.5 * expected, rel=1e-6)


def test_k3_and_k2_are_never_negative_and_zero_at_the_reference():
    drift = jnp.linspace(-3.0, 3.0, 13)
    for estimator in ("k2", "k3"):
        value = loss_lib.kl_estimate(drift, estimator)
        assert jnp.all(value >= 0)
        assert value[6] == 0.0


def test_the_entropy_bonus_lowers_the_loss():
    batch = make_batch(advantage=[0.0], coefficient=[0.5], behaviour=[-1.0])
    loss, _ = run([-1.0], batch, entropy=[2.0], entropy_weight=0.01)
    assert loss == pytest.approx(-0.01 * 0.5 * 2.0)


def test_the_gradient_equals_finite_differences():
    rng = np.random.default_rng(0)
    n = 12
    with jax.enable_x64(True):
        batch = types.SimpleNamespace(
            loss_mask=jnp.ones((1, n)),
            advantage=jnp.asarray(rng.normal(size=(1, n))),
            coefficient=jnp.asarray(rng.uniform(0.1, 1.0, size=(1, n))),
            behaviour_logprob=jnp.asarray(rng.normal(-2.0, 0.1, size=(1, n))),
            reference_logprob=jnp.asarray(rng.normal(-2.0, 0.3, size=(1, n))),
        )
        x = jnp.asarray(rng.normal(-2.0, 0.1, size=(1, n)))
        settings = LossSettings(dual_clip=3.0, kl_weight=0.2, kl_estimator="k3")

        def value(logprob):
            return loss_lib.tree_loss(logprob, jnp.zeros((1, n)), batch, settings)[0]

        grad = jax.grad(value)(x)
        step = 1e-6
        numeric = [
            (value(x.at[0, i].add(step)) - value(x.at[0, i].add(-step))) / (2 * step)
            for i in range(n)
        ]
        # float64 central differences: 1e-6 covers their truncation.
        np.testing.assert_allclose(grad[0], numeric, atol=1e-6)


def test_masked_tokens_count_nowhere_even_when_they_are_not_finite():
    batch = make_batch(
        advantage=[1.0, np.nan], coefficient=[1.0, np.nan], behaviour=[-1.0, np.inf],
        reference=[-1.0, np.nan], mask=[1.0, 0.0],
    )  # fmt: skip
    settings = {"kl_weight": 0.1, "entropy_weight": 0.1}
    loss, sums = run([-1.0, -np.inf], batch, entropy=[1.0, np.nan], **settings)
    assert loss == pytest.approx(-1.0 - 0.1)
    assert all(np.isfinite(float(x)) for x in sums.values())
    grad = jax.grad(lambda x: run([x[0], x[1]], batch, entropy=[1.0, 0.0], **settings)[0])(
        jnp.asarray([-1.0, -500.0])
    )
    np.testing.assert_allclose(grad, [-1.0, 0.0])


def test_losses_and_sums_of_parts_add_up_to_the_whole():
    whole = make_batch(
        advantage=[1.0, -2.0, 0.5, 1.5], coefficient=[0.1, 0.2, 0.3, 0.4],
        behaviour=[-1.0, -1.2, -0.7, -2.0],
    )  # fmt: skip
    logprob = [-0.9, -1.5, -0.6, -2.4]
    loss, sums = run(logprob, whole)
    parts = []
    for cut in (slice(0, 1), slice(1, 4)):
        fields = {name: x[:, cut] for name, x in vars(whole).items()}
        parts.append(run(logprob[cut], types.SimpleNamespace(**fields)))
    assert loss == pytest.approx(float(parts[0][0] + parts[1][0]), rel=1e-6)
    for name, value in sums.items():
        assert value == pytest.approx(float(parts[0][1][name] + parts[1][1][name]), rel=1e-6)


def test_every_sum_is_declared():
    batch = make_batch(advantage=[1.0], coefficient=[1.0], behaviour=[0.0])
    assert set(run([0.0], batch)[1]) == set(loss_lib.SUMS)
    _, sums = run([0.0], batch, kl_weight=0.1)
    assert set(sums) == {*loss_lib.SUMS, *loss_lib.REFERENCE_SUMS}


def test_numbers_of_the_reference_are_logged_only_where_there_is_one():
    batch = make_batch(advantage=[1.0], coefficient=[1.0], behaviour=[0.0])
    for weight in (0.0, 0.1):
        metrics = loss_lib.finish_metrics(run([0.0], batch, kl_weight=weight)[1])
        assert ("loss/kl" in metrics) == ("diag/reference_kl" in metrics) == bool(weight)


def test_an_overflowing_ratio_stays_finite():
    batch = make_batch(advantage=[-1.0], coefficient=[1.0], behaviour=[-200.0])
    loss, sums = run([0.0], batch)
    assert np.isfinite(loss)
    assert np.isfinite(sums["ratio_squared"])
