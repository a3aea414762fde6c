"""The loss against numbers worked out by hand, a plain implementation and finite differences."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import packing
from bpo_jax.learner import loss as loss_lib
from bpo_jax.learner.loss import LossSettings
from tests.learner.plain_loss import plain_loss
from tests.trees import random_tree, random_weights


def make_batch(
    *, advantage, coefficient, behaviour, reference=None, mask=None, action=None, proximal=None
):
    def row(values):
        return jnp.asarray([values], jnp.float32)

    n = len(advantage)
    return types.SimpleNamespace(
        loss_mask=row(mask or [1.0] * n),
        advantage=row(advantage),
        coefficient=row(coefficient),
        behaviour_logprob=row(behaviour),
        reference_logprob=row(reference or [0.0] * n),
        proximal_logprob=None if proximal is None else row(proximal),
        action_id=jnp.asarray([action or [0] * n]),
        tree_id=jnp.zeros((1, n), jnp.int32),
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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_expected_gradient_that_is_claimed(estimator):
    # Over a distribution of five tokens the mean over samples is a sum.
    with jax.enable_x64(True):
        logits, other = np.random.default_rng(0).normal(size=(2, 5))
        reference = jax.nn.log_softmax(jnp.asarray(other))
        sampled_from = jax.nn.softmax(jnp.asarray(logits))

        def estimated(x):
            drift = jax.nn.log_softmax(x) - reference
            return jnp.sum(sampled_from * loss_lib.kl_estimate(drift, estimator))

        def claimed(x):
            logp = jax.nn.log_softmax(x)
            forward = jnp.sum(jnp.exp(reference) * (reference - logp))
            reverse = jnp.sum(jnp.exp(logp) * (logp - reference))
            return {"k1": 0.0 * reverse, "k2": reverse, "k3": forward}[estimator]

        found, wanted = (jax.grad(f)(jnp.asarray(logits)) for f in (estimated, claimed))
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_the_entropy_bonus_lowers_the_loss():
    batch = make_batch(advantage=[0.0], coefficient=[0.5], behaviour=[-1.0])
    loss, _ = run([-1.0], batch, entropy=[2.0], entropy_weight=0.01)
    assert loss == pytest.approx(-0.01 * 0.5 * 2.0)


@pytest.mark.parametrize("ratio", ["token", "action"])
def test_the_gradient_equals_finite_differences(ratio):
    rng = np.random.default_rng(0)
    n = 12
    with jax.enable_x64(True):
        batch = types.SimpleNamespace(
            loss_mask=jnp.ones((1, n)),
            advantage=jnp.asarray(rng.normal(size=(1, n))),
            coefficient=jnp.asarray(rng.uniform(0.1, 1.0, size=(1, n))),
            behaviour_logprob=jnp.asarray(rng.normal(-2.0, 0.1, size=(1, n))),
            reference_logprob=jnp.asarray(rng.normal(-2.0, 0.3, size=(1, n))),
            action_id=jnp.asarray([[0, 0, 0, -1, 1, 1, 2, 3, 3, 3, 3, -1]]),
            tree_id=jnp.zeros((1, n), jnp.int32),
        )
        x = jnp.asarray(rng.normal(-2.0, 0.1, size=(1, n)))
        settings = LossSettings(dual_clip=3.0, kl_weight=0.2, kl_estimator="k3", ratio=ratio)

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
        fields = {n: None if x is None else x[:, cut] for n, x in vars(whole).items()}
        parts.append(run(logprob[cut], types.SimpleNamespace(**fields)))
    assert loss == pytest.approx(float(parts[0][0] + parts[1][0]), rel=1e-6)
    for name, value in sums.items():
        assert value == pytest.approx(float(parts[0][1][name] + parts[1][1][name]), rel=1e-6)


def test_every_sum_is_declared():
    batch = make_batch(advantage=[1.0], coefficient=[1.0], behaviour=[0.0])
    for settings in ({}, {"kl_weight": 0.1}, {"importance_cap": 2.0}):
        assert set(run([0.0], batch, **settings)[1]) == set(
            loss_lib.sum_names(LossSettings(**settings))
        )


# --- ratios of actions --------------------------------------------------------------------------


def test_on_policy_both_ratios_have_the_same_loss_and_gradient():
    batch = make_batch(
        advantage=[2.0, 2.0, -1.0], coefficient=[0.5, 0.5, 0.25], behaviour=[-1.0, -2.0, -0.5],
        action=[0, 0, 1],
    )  # fmt: skip
    found = []
    for ratio in ("token", "action"):
        settings = LossSettings(ratio=ratio)

        def value(x, settings=settings):
            return loss_lib.tree_loss(x, jnp.zeros((1, 3)), batch, settings)[0]

        found.append(jax.value_and_grad(value)(batch.behaviour_logprob))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


def test_an_action_has_the_geometric_mean_of_its_tokens_ratios():
    batch = make_batch(
        advantage=[1.0] * 3, coefficient=[1.0] * 3, behaviour=[0.0] * 3, action=[0, 0, 1]
    )
    loss, _ = run([np.log(0.9), np.log(0.4), np.log(1.1)], batch, ratio="action")
    assert loss == pytest.approx(-(2 * np.sqrt(0.9 * 0.4) + 1.1), rel=1e-6)


def test_an_action_is_clipped_as_a_whole():
    batch = make_batch(advantage=[1.0, 1.0], coefficient=[1.0, 1.0], behaviour=[0.0, 0.0])
    moved = jnp.log(jnp.asarray([2.0, 1.0]))  # sqrt(2) is beyond 1.2

    def slope(ratio):
        return jax.grad(lambda x: run(x, batch, ratio=ratio)[0])(moved)

    np.testing.assert_allclose(slope("action"), [0.0, 0.0])
    np.testing.assert_allclose(slope("token"), [0.0, -1.0])
    assert run(moved, batch, ratio="action")[1]["clipped"] == 2


# --- the gap between sampler and learner --------------------------------------------------------


def test_the_gap_weighs_a_token_up_to_the_cap_and_is_no_part_of_the_ratio():
    # Twice and five times as likely for the learner as for the sampler, then not moved since.
    batch = make_batch(
        advantage=[1.0, 1.0], coefficient=[1.0, 1.0], behaviour=[0.0, 0.0],
        proximal=[np.log(2.0), np.log(5.0)],
    )  # fmt: skip
    loss, sums = run([np.log(2.0), np.log(5.0)], batch, importance_cap=3.0)
    assert loss == pytest.approx(-(2.0 + 3.0), rel=1e-6)
    assert sums["clipped"] == 0.0
    metrics = loss_lib.finish_metrics(sums)
    assert metrics["diag/importance_capped"] == pytest.approx(0.5)
    assert metrics["diag/ess"] == pytest.approx(5.0**2 / (2 * 13.0), rel=1e-6)


def test_clipping_counts_from_the_learners_own_policy():
    batch = make_batch(advantage=[1.0], coefficient=[1.0], behaviour=[0.0], proximal=[np.log(0.5)])
    loss, _ = run([np.log(0.5) + np.log(1.5)], batch, importance_cap=3.0)
    assert loss == pytest.approx(-0.5 * 1.2, rel=1e-6)


def test_in_the_first_step_the_policy_being_trained_is_the_learners_own():
    batch = make_batch(advantage=[1.0], coefficient=[1.0], behaviour=[0.0])
    value, slope = jax.value_and_grad(lambda x: run([x], batch, importance_cap=3.0)[0])(
        float(np.log(2.0))
    )
    assert value == pytest.approx(-2.0, rel=1e-6)
    assert slope == pytest.approx(-2.0, rel=1e-6)  # u stays out of the gradient: u r dlog pi


def test_without_a_gap_the_cap_changes_nothing():
    batch = make_batch(
        advantage=[1.0, -1.0], coefficient=[0.5, 0.5], behaviour=[-1.0, -2.0],
        proximal=[-1.0, -2.0],
    )  # fmt: skip
    capped, plain = (run([-0.7, -2.1], batch, importance_cap=cap)[0] for cap in (2.0, None))
    assert capped == pytest.approx(float(plain), rel=1e-6)


@pytest.mark.parametrize("settings", [{"ratio": "turn"}, {"importance_cap": 0.0}])
def test_settings_out_of_range_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LossSettings(**settings)


# --- the critic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 0.5 * 4.0),  # inside the bound
        (2.0, 0.5 * 1.5**2),  # beyond it, towards the target: no gain beyond prediction + clip
        (-3.0, 0.5 * 36.0),  # away from the target is never bounded
    ],
)
def test_the_value_loss_is_bounded_where_the_value_moved_towards_its_target(value, expected):
    found = loss_lib.value_loss(jnp.float32(value), jnp.float32(3.0), jnp.float32(0.5), 1.0)
    assert found == pytest.approx(expected)


def test_a_bounded_value_is_not_drawn_on():
    slope = jax.grad(lambda v: loss_lib.value_loss(v, 3.0, 0.5, 1.0))
    assert slope(2.0) == 0.0
    assert slope(1.0) == pytest.approx(-2.0)


def test_a_critic_without_values_is_refused():
    batch = make_batch(advantage=[1.0], coefficient=[1.0], behaviour=[0.0])
    batch.value_target = None
    with pytest.raises(ValueError, match="no values to compare"):
        run([0.0], batch, value_weight=0.5)


# --- everything at once -------------------------------------------------------------------------


def random_batch(seed: int) -> tuple[packing.TreeBatch, np.ndarray, np.ndarray, np.ndarray]:
    """Rows with several trees, some of whose trajectories were lost, and a policy that moved."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(seed + i, masked_rate=0.3, fork_rate=0.4) for i in range(4)]
    weights = []
    for i, tree in enumerate(trees):
        count = len(tree.decisions())
        weights.append(
            dataclasses.replace(
                random_weights(tree, seed + i),
                value_target=rng.normal(size=count),
                value_prediction=rng.normal(size=count),
                value_weight=rng.uniform(0.1, 1.0, count),
            )
        )
    (batch, *_) = packing.pack(trees, weights, rows=4, row_length=128)
    shape = batch.tokens.shape
    near = batch.behaviour_logprob + rng.normal(0.0, 0.3, shape)
    batch = dataclasses.replace(
        batch,
        reference_logprob=(near + rng.normal(0.0, 0.3, shape)).astype(np.float32),
        proximal_logprob=(near + rng.normal(0.0, 0.2, shape)).astype(np.float32),
    )
    return batch, near.astype(np.float32), rng.uniform(0, 3, shape), rng.normal(size=shape)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ratio": "action", "clip_low": 0.1, "clip_high": 0.15},
        {"dual_clip": 1.1, "entropy_weight": 0.02},
        {"importance_cap": 1.2},
        {"importance_cap": 1.2, "ratio": "action", "kl_weight": 0.1, "kl_estimator": "k1"},
        {"kl_weight": 0.1, "kl_estimator": "k2"},
        {"kl_weight": 0.1, "kl_estimator": "k3"},
        {"value_weight": 0.5},
        {"value_weight": 0.5, "value_clip": 0.3, "ratio": "action"},
    ],
)
def test_the_loss_and_all_that_is_logged_agree_with_a_plain_implementation(settings, seed):
    batch, logprob, entropy, value = random_batch(seed)
    found = LossSettings(**settings)
    loss, sums = loss_lib.tree_loss(
        jnp.asarray(logprob), jnp.asarray(entropy), batch, found, jnp.asarray(value)
    )
    expected = plain_loss(logprob.astype(np.float64), entropy, batch, found, value)
    # float32 sums over a few hundred tokens.
    assert loss == pytest.approx(expected.pop("loss"), rel=1e-4, abs=1e-4)
    assert loss_lib.finish_metrics(sums) == pytest.approx(expected, rel=1e-4, abs=1e-4)


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
