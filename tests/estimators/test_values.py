"""Values, validity and flow weights. Sums of few float64 numbers: compared to 1e-12."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

from bpo_jax.estimators import solve
from bpo_jax.estimators.exact.mdp import estimated_value
from bpo_jax.estimators.values import ROOT, others_mean
from tests.estimators.trees import edge, flat, leaf, masked, random_trees, tree


def test_a_value_is_the_mean_over_children_of_reward_plus_discounted_value():
    solved = solve(tree(edge(leaf(2.0), leaf(4.0), reward=1.0), leaf(6.0)), gamma=0.5)
    np.testing.assert_allclose(solved.q, [1.0 + 0.5 * 3.0, 2.0, 4.0, 6.0])
    assert solved.root_value == pytest.approx((2.5 + 6.0) / 2)


def test_flow_is_split_equally_at_every_decision():
    solved = solve(tree(edge(leaf(), leaf()), edge(edge(leaf(), leaf(), leaf()))))
    np.testing.assert_allclose(solved.weight, [1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 2] + [1 / 6] * 3)


def test_masked_leaves_leave_means_and_give_their_flow_to_siblings():
    solved = solve(tree(edge(leaf(2.0), masked(), leaf(4.0)), edge(masked())))
    np.testing.assert_array_equal(solved.valid, [True, True, False, True, False, False])
    np.testing.assert_allclose(solved.weight, [1.0, 0.5, 0.0, 0.5, 0.0, 0.0])
    assert solved.root_value == pytest.approx(3.0)


def test_truncation_is_an_outcome_with_a_return():
    assert solve(tree(leaf(2.0, end="truncated"), leaf(4.0))).root_value == pytest.approx(3.0)


def test_a_tree_whose_leaves_are_all_masked_has_no_value():
    solved = solve(tree(masked(), edge(masked(), masked())))
    assert math.isnan(solved.root_value)
    assert not solved.weight.any()


def test_totals_count_from_the_start():
    solved = solve(tree(edge(leaf(4.0), leaf(8.0), reward=1.0)), gamma=0.5)
    np.testing.assert_allclose(solved.total, [4.0, 3.0, 5.0])


def test_the_parts_of_a_turn_are_not_discounted_against_each_other():
    # A first turn, forked midway and worth 2 in one part, then a turn worth 8.
    grown = tree(edge(edge(leaf(8.0), reward=2.0), leaf(4.0), mid_turn=True))
    solved = solve(grown, gamma=0.5)
    np.testing.assert_allclose(solved.q, [(6.0 + 4.0) / 2, 2.0 + 0.5 * 8.0, 8.0, 4.0])
    np.testing.assert_allclose(solved.discount, [1.0, 1.0, 0.5, 1.0])
    np.testing.assert_allclose(solved.total, [5.0, 6.0, 6.0, 4.0])


def test_the_mean_of_the_others_skips_masked_siblings():
    solved = solve(tree(leaf(1.0), leaf(2.0), masked(), leaf(6.0), edge(leaf(5.0))))
    expected = [13 / 3, 4.0, 0.0, 8 / 3, 3.0, 0.0]
    np.testing.assert_allclose(others_mean(solved), expected)


@settings(max_examples=60, deadline=None)
@given(random_trees)
def test_arrays_follow_the_order_of_actions(grown):
    solved = solve(grown)
    actions = grown.actions()
    assert solved.reward.tolist() == [a.reward for a in actions]
    for action, parent in zip(actions, solved.parent, strict=True):
        siblings = grown.root.actions if parent == ROOT else actions[parent].next.actions
        assert any(action is s for s in siblings)


@settings(max_examples=60, deadline=None)
@given(random_trees)
def test_the_flow_of_the_leaves_is_one_and_their_returns_average_to_the_value(grown):
    solved = solve(grown, gamma=0.9)
    counted = solved.leaf & solved.valid
    if not counted.any():
        return
    assert solved.weight[counted].sum() == pytest.approx(1.0, abs=1e-12)
    mean = solved.weight[counted] @ solved.total[counted]
    assert mean == pytest.approx(solved.root_value, abs=1e-12)
    paths = [p for p in grown.paths() if p[-1].end != "masked"]
    returns = [sum(0.9**t * a.reward for t, a in enumerate(p)) for p in paths]
    np.testing.assert_allclose(solved.total[counted], returns, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(random_trees)
def test_the_value_of_the_root_follows_its_definition(grown):
    expected = estimated_value(grown.root, 0.9)
    value = solve(grown, gamma=0.9).root_value
    assert math.isnan(value) if expected is None else value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("grown", "message"),
    [
        (tree(), "has no actions"),
        (tree(leaf(), edge()), "action 1 .* must either end"),
        (tree(leaf(float("nan"))), "action 0 .* reward nan"),
    ],
)
def test_unfinished_trees_are_refused(grown, message):
    with pytest.raises(ValueError, match=message):
        solve(grown)


@pytest.mark.parametrize("gamma", [0.0, 1.1, float("nan")])
def test_a_discount_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        solve(flat([1.0]), gamma=gamma)
