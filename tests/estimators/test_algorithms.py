"""Advantages worked out by hand. Sums of few float64 numbers: compared to 1e-12 or so."""

import numpy as np
import pytest
from hypothesis import given, settings

from bpo_jax.estimators import ALGORITHMS, Shrinkage
from tests.estimators.trees import edge, flat, leaf, masked, random_trees, tree


def bpo(grown, **options):
    return ALGORITHMS["bpo"].estimate(grown, **options)


def test_siblings_are_compared_with_the_mean_of_the_others():
    result = bpo(tree(leaf(1.0), leaf(2.0), leaf(6.0)))
    np.testing.assert_allclose(result.advantage, [1 - 4, 2 - 3.5, 6 - 1.5])
    np.testing.assert_allclose(result.coefficient, [1 / 3] * 3)


def test_an_unforked_decision_inherits_its_baseline_less_what_was_earned_since():
    #      root a: reward 1, fork -> {b: reward 2, then c: 3; d: 7}, root e: 10
    grown = tree(edge(edge(leaf(3.0), reward=2.0), leaf(7.0), reward=1.0), leaf(10.0))
    a, b, c, d, e = bpo(grown).advantage
    assert a == pytest.approx((1 + (5 + 7) / 2) - 10)
    assert b == pytest.approx(5 - 7)
    assert c == pytest.approx(3 - (7 - 2))
    assert d == pytest.approx(7 - 5)
    assert e == pytest.approx(10 - 7)


def test_inherited_baselines_are_counted_from_where_they_are_used():
    grown = tree(edge(leaf(4.0), reward=1.0), leaf(10.0))
    result = bpo(grown, gamma=0.5)
    np.testing.assert_allclose(result.advantage, [3.0 - 10.0, 4.0 - (10.0 - 1.0) / 0.5, 7.0])
    np.testing.assert_allclose(result.coefficient, [0.5, 0.5 * 0.5, 0.5])


def test_the_parts_of_a_turn_share_an_inherited_baseline():
    grown = tree(edge(edge(leaf(4.0), reward=1.0), mid_turn=True), leaf(10.0))
    result = bpo(grown, gamma=0.5)
    np.testing.assert_allclose(result.advantage, [3.0 - 10, 3.0 - 10, 4.0 - (10 - 1) / 0.5, 7.0])
    np.testing.assert_allclose(result.coefficient, [0.5, 0.5, 0.5 * 0.5, 0.5])


def test_one_root_is_compared_with_a_constant():
    np.testing.assert_allclose(bpo(flat([5.0], length=2)).advantage, [5.0, 5.0])
    np.testing.assert_allclose(bpo(flat([5.0], length=2), baseline=4.0).advantage, [1.0, 1.0])


def test_a_fork_left_with_one_child_inherits_like_an_unforked_decision():
    grown = tree(edge(leaf(3.0), masked()), leaf(1.0))
    result = bpo(grown)
    np.testing.assert_allclose(result.advantage, [2.0, 2.0, 0.0, -2.0])
    np.testing.assert_allclose(result.coefficient, [0.5, 0.5, 0.0, 0.5])


def test_shrinkage_mixes_in_the_inherited_baseline_by_the_level_of_the_fork():
    grown = tree(edge(leaf(3.0), edge(leaf(6.0), leaf(8.0))), leaf(1.0))
    first = Shrinkage(between=1.0, inherited=1.0, within=6.0)  # alpha 1/4 with two children
    second = Shrinkage(between=1.0, inherited=2.0, within=3.0)  # alpha 1/2
    _, left, right, six, eight, _ = bpo(grown, shrinkage=(first, second)).advantage
    assert left == pytest.approx(3.0 - (7.0 / 4 + 1.0 * 3 / 4))
    inherited = 3.0 / 4 + 1.0 * 3 / 4
    assert right == pytest.approx(7.0 - inherited)
    assert six == pytest.approx(6.0 - (8.0 + inherited) / 2)
    assert eight == pytest.approx(8.0 - (6.0 + inherited) / 2)


def test_a_flow_exponent_reweighs_actions_and_leaves_advantages_alone():
    grown = tree(edge(leaf(3.0), leaf(5.0), masked()), leaf(1.0))
    plain, even = bpo(grown), bpo(grown, flow_exponent=0.0, flow_normalizer=4.0)
    np.testing.assert_allclose(even.advantage, plain.advantage)
    np.testing.assert_allclose(even.coefficient, [0.25, 0.25, 0.25, 0.0, 0.25])
    root = bpo(grown, flow_exponent=0.5)
    np.testing.assert_allclose(root.coefficient, np.sqrt(plain.coefficient))


@pytest.mark.parametrize(
    "options",
    [{"flow_exponent": -1.0}, {"flow_normalizer": 0.0}, {"gamma": 0.0}],
)
def test_settings_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        bpo(flat([1.0]), **options)


def test_shrinkage_wants_variances():
    with pytest.raises(ValueError, match="within"):
        Shrinkage(between=0.0, inherited=0.0, within=-1.0)


def test_rloo_gives_every_action_of_a_trajectory_the_same_advantage():
    grown = tree(edge(leaf(2.0), reward=1.0), leaf(7.0), edge(masked()))
    result = ALGORITHMS["rloo"].estimate(grown)
    np.testing.assert_allclose(result.advantage, [-4.0, -4.0, 4.0, 0.0, 0.0])
    np.testing.assert_allclose(result.coefficient, [0.5, 0.5, 0.5, 0.0, 0.0])


def test_rloo_with_a_row_per_step_lets_long_trajectories_dominate_the_mean():
    grown = tree(edge(edge(leaf(6.0))), leaf(2.0))
    result = ALGORITHMS["rloo"].estimate(grown, row_per_step=True)
    long = 6.0 - (6.0 + 6.0 + 2.0) / 3
    np.testing.assert_allclose(result.advantage, [long, long, long, 2.0 - 6.0])


def test_rloo_refuses_forks():
    with pytest.raises(ValueError, match="has 1 forks"):
        ALGORITHMS["rloo"].estimate(tree(edge(leaf(), leaf()), leaf()))


def test_grpo_measures_returns_in_deviations_of_their_group():
    result = ALGORITHMS["grpo"].estimate(flat([0.0, 0.0, 1.0, 3.0], length=2))
    sigma = np.std([0.0, 0.0, 1.0, 3.0])
    expected = np.repeat([-1.0, -1.0, 0.0, 2.0], 2) / sigma
    np.testing.assert_allclose(result.advantage, expected, rtol=1e-5)  # epsilon is 1e-6
    np.testing.assert_allclose(result.coefficient, 0.25)


def test_grpo_on_a_tree_weighs_leaves_by_their_flow():
    grown = tree(edge(leaf(4.0), leaf(0.0)), leaf(6.0))
    mu = (4.0 + 0.0) / 4 + 6.0 / 2
    sigma = np.sqrt((0.0**2 + 4.0**2) / 4 + 2.0**2 / 2)
    expected = (np.array([2.0, 4.0, 0.0, 6.0]) - mu) / sigma
    result = ALGORITHMS["grpo"].estimate(grown)
    np.testing.assert_allclose(result.advantage, expected, atol=1e-5)


def test_equal_returns_teach_nothing():
    for name in ("grpo", "dr_grpo", "rloo", "bpo"):
        result = ALGORITHMS[name].estimate(flat([1.0, 1.0, 1.0], length=3))
        np.testing.assert_array_equal(result.advantage, 0.0)


@pytest.mark.parametrize("name", ["bpo", "grpo", "dr_grpo"])
@settings(max_examples=40, deadline=None)
@given(random_trees)
def test_every_tree_gets_finite_numbers_and_nothing_where_no_return_lies(name, grown):
    result = ALGORITHMS[name].estimate(grown, gamma=0.9)
    assert result.advantage.shape == result.coefficient.shape == (len(grown.actions()),)
    assert np.isfinite(result.advantage).all()
    for action, coefficient in zip(grown.actions(), result.coefficient, strict=True):
        if action.end == "masked":
            assert coefficient == 0.0
    assert (result.advantage[result.coefficient == 0.0] == 0.0).all()


def test_adding_a_constant_to_every_return_changes_no_advantage():
    low, high = flat([0.0, 1.0, 5.0], length=2), flat([9.0, 10.0, 14.0], length=2)
    for name in ("bpo", "grpo", "dr_grpo", "rloo"):
        estimate = ALGORITHMS[name].estimate
        np.testing.assert_allclose(estimate(low).advantage, estimate(high).advantage, atol=1e-12)


def test_the_registry_says_what_each_algorithm_needs():
    assert {n: a.name for n, a in ALGORITHMS.items()} == {n: n for n in ALGORITHMS}
    assert ALGORITHMS["bpo"].branches and not ALGORITHMS["rloo"].branches
    assert ALGORITHMS["rloo"].placements == ("none",)
    assert ALGORITHMS["rloo"].settings == {"row_per_step": False}
    assert set(ALGORITHMS["bpo"].settings) == {
        "flow_exponent", "flow_normalizer", "baseline", "shrinkage",
    }  # fmt: skip
