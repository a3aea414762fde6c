"""VinePPO: trained trajectories are measured by auxiliary ones, which are not trained."""

import functools

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import coin, error, in_turns, random_mdp
from tests.estimators.trees import edge, flat, leaf, masked, tree

TOLERANCE, MARGIN = 1e-10, 0.02


def vine(grown, **settings):
    return ALGORITHMS["vineppo"].estimate(grown, **settings)


def check(mdp, scheduler):
    estimator = functools.partial(vine, gamma=mdp.gamma)
    expected = mdp_lib.expect(mdp, scheduler, estimator).gradient
    assert error(expected, mdp.gradient()) < TOLERANCE


def test_an_action_is_worth_its_reward_and_what_the_value_gains():
    # a, reward 1, then {b, reward 2, then {c: 3; 5; 7}; 4; 6}, beside another root that earns 10
    lower = edge(leaf(3.0), leaf(5.0), leaf(7.0), reward=2.0)
    result = vine(tree(edge(lower, leaf(4.0), leaf(6.0), reward=1.0), leaf(10.0)))
    a, b, c, *auxiliary, other = result.advantage
    assert a == pytest.approx(1.0 + 5.0 - 10.0)
    assert b == pytest.approx(2.0 + 6.0 - 5.0)
    assert c == pytest.approx(3.0 - 6.0)
    assert auxiliary == [0.0] * 4
    assert other == pytest.approx(10.0 - (1.0 + (2.0 + 5.0 + 4.0 + 6.0) / 3))


def test_auxiliary_rollouts_are_not_trained():
    grown = tree(edge(leaf(1.0), edge(leaf(2.0))), leaf(0.0))
    np.testing.assert_allclose(vine(grown).coefficient, [0.5, 0.5, 0.0, 0.0, 0.5])


def test_a_trained_action_is_in_no_estimate_that_it_is_measured_by():
    def advantages(reward):
        return vine(tree(edge(leaf(reward), leaf(4.0), leaf(6.0)), leaf(10.0))).advantage

    low, high = advantages(0.0), advantages(100.0)
    assert low[0] == high[0]
    assert high[1] - low[1] == pytest.approx(100.0)


def test_without_auxiliary_rollouts_the_advantage_spans_several_steps():
    # a 1, b 2, then {c: 3; auxiliary 9}
    grown = tree(edge(edge(leaf(3.0), leaf(9.0), reward=2.0), reward=1.0), leaf(10.0))
    a, b, c, *_ = vine(grown, gamma=0.5).advantage
    assert a == pytest.approx(1.0 + 0.5 * (2.0 + 0.5 * 9.0) - 10.0)
    assert b == pytest.approx(2.0 + 0.5 * 9.0 - (10.0 - 1.0) / 0.5)
    assert c == pytest.approx(3.0 - 9.0)


def test_without_any_auxiliary_rollout_it_is_bpo_on_flat_trees():
    grown = flat([1.0, 4.0, 7.0], length=3)
    bpo = ALGORITHMS["bpo"].estimate(grown, gamma=0.9)
    result = vine(grown, gamma=0.9)
    np.testing.assert_allclose(result.advantage, bpo.advantage)
    np.testing.assert_allclose(result.coefficient, bpo.coefficient)


def test_a_trained_trajectory_that_was_lost_is_left_out():
    grown = tree(edge(masked(), leaf(4.0)), leaf(1.0), leaf(3.0))
    result = vine(grown)
    np.testing.assert_allclose(result.coefficient, [0.0, 0.0, 0.0, 0.5, 0.5])
    np.testing.assert_allclose(result.advantage[3:], [1.0 - 3.5, 3.0 - 2.5])


def test_an_auxiliary_rollout_that_was_lost_counts_in_no_value():
    grown = tree(edge(leaf(1.0), masked(), leaf(6.0)), leaf(2.0))
    assert vine(grown).advantage[0] == pytest.approx(6.0 - 2.0)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("roots, children", [(1, 2), (1, 3)])
def test_rollouts_from_every_decision_give_the_gradient(roots, children, gamma):
    mdp = random_mdp(0, gamma=gamma, early_end=0.2)
    check(mdp, grow.along_backbone(roots, grow.everywhere(children)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [grow.uncertain, grow.at_depths({1: 2}), grow.at_depths({2: 2})])
def test_rollouts_from_some_decisions_give_the_gradient(rule, seed):
    check(random_mdp(seed, early_end=0.2), grow.along_backbone(2, rule))


def test_forks_below_auxiliary_actions_do_no_harm():
    check(random_mdp(4, early_end=0.3), grow.depth_first(1, grow.at_depths({1: 2, 2: 2})))


def test_decisions_in_the_middle_of_a_turn():
    mdp = in_turns(random_mdp(0, depth=4, gamma=0.8, early_end=0.3), 2, 2)
    check(mdp, grow.along_backbone(2, grow.midway))


def test_masks_that_fall_independently_of_actions():
    def scheduler(mdp):
        grown = yield from grow.along_backbone(2, grow.at_depths({1: 2}))(mdp)
        for end in grown.leaves():
            # One trained trajectory is left in any case: without one there is no estimate.
            spared = end is next(grown.paths())[-1]
            if not spared and (yield from coin(0.3)):
                end.end, end.reward = "masked", 0.0
        return grown

    check(random_mdp(8, depth=2), scheduler)


def test_values_from_rollouts_chosen_after_the_fact_point_elsewhere():
    mdp = random_mdp(0, gamma=1.0, early_end=0.2)
    scheduler = grow.post_hoc_top(2, forks=1, fresh=1)
    expected = mdp_lib.expect(mdp, scheduler, vine).gradient
    assert error(expected, mdp.gradient()) > MARGIN
