"""GAE on trees, by hand and exactly."""

import functools

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS, solve
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import direction_error, error, history_of, in_turns, random_mdp
from bpo_jax.estimators.ppo import gae
from tests.estimators.trees import edge, leaf, masked, tree

TOLERANCE, MARGIN = 1e-10, 0.02


def critic(mdp, *, wrong: float):
    """PPO with a critic that errs by so much, in another way at every state."""
    rng = np.random.default_rng(0)
    said = {h: mdp.value(h) + wrong * rng.normal() for h in mdp.policy}

    def estimator(grown, *, lam):
        values = np.array([said[history_of(d)] for d in grown.decisions()])
        ppo = ALGORITHMS["ppo"].estimate
        return ppo(grown, decision_values=values, gamma=mdp.gamma, lam=lam)

    return estimator


def expected(mdp, scheduler, *, wrong, lam):
    estimator = functools.partial(critic(mdp, wrong=wrong), lam=lam)
    return mdp_lib.expect(mdp, scheduler, estimator).gradient


def test_advantages_and_targets_by_hand():
    #   V 2: a, reward 1 -> V 4: {b: 6; c, reward 1 -> V 5: d: 3}
    grown = tree(edge(leaf(6.0), edge(leaf(3.0), reward=1.0), reward=1.0))
    found = gae(grown, np.array([2.0, 4.0, 5.0]), gamma=0.5, lam=0.5)
    d = 3.0 - 5.0
    b, c = 6.0 - 4.0, 1.0 + 0.5 * 5.0 - 4.0 + 0.25 * d
    a = 1.0 + 0.5 * 4.0 - 2.0 + 0.25 * (b + c) / 2
    np.testing.assert_allclose(found.advantage, [a, b, c, d])
    np.testing.assert_allclose(found.target, [2.0 + a, 4.0 + (b + c) / 2, 5.0 + d])
    np.testing.assert_allclose(found.weight, [1.0, 1.0, 0.5])


def test_lambda_one_is_the_return_less_the_value():
    grown = tree(edge(leaf(6.0), edge(leaf(3.0), reward=1.0), reward=1.0), leaf(2.0))
    values = np.array([2.0, 4.0, 5.0])
    found, solved = gae(grown, values, gamma=0.9, lam=1.0), solve(grown, 0.9)
    np.testing.assert_allclose(found.advantage, solved.q - values[solved.decision])
    assert found.target[0] == pytest.approx(solved.root_value)


def test_lambda_zero_looks_one_step_ahead():
    grown = tree(edge(edge(leaf(100.0)), reward=1.0))
    found = gae(grown, np.array([2.0, 4.0, 5.0]), gamma=0.5, lam=0.0)
    np.testing.assert_allclose(found.advantage, [1 + 2 - 2, 2.5 - 4, 100 - 5])


def test_what_was_lost_counts_nowhere():
    grown = tree(edge(leaf(6.0), masked()), edge(masked()))
    found = gae(grown, np.array([1.0, 2.0, 3.0]), gamma=1.0, lam=0.5)
    np.testing.assert_allclose(found.advantage, [2 - 1 + 0.5 * 4, 4.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(found.target, [4.0, 6.0, 0.0])
    np.testing.assert_allclose(found.weight, [1.0, 1.0, 0.0])


def test_the_parts_of_a_turn_are_neither_discounted_nor_faded():
    grown = tree(edge(leaf(6.0), mid_turn=True))
    found = gae(grown, np.array([1.0, 2.0]), gamma=0.5, lam=0.5)
    np.testing.assert_allclose(found.advantage, [2.0 - 1.0 + 4.0, 4.0])


def test_values_that_do_not_fit_the_tree_are_refused():
    with pytest.raises(ValueError, match=r"has 1 decisions, but its values have shape \(2,\)"):
        gae(tree(leaf()), np.zeros(2), 1.0, 1.0)
    with pytest.raises(ValueError, match="not finite"):
        gae(tree(leaf()), np.array([np.nan]), 1.0, 1.0)
    with pytest.raises(ValueError, match="lam is 2"):
        gae(tree(leaf()), np.zeros(1), 1.0, 2.0)


SCHEDULERS = [
    pytest.param(grow.depth_first(2, grow.nowhere), id="flat"),
    pytest.param(grow.depth_first(1, grow.uncertain), id="one root"),
    pytest.param(grow.by_arrival(2, grow.uncertain, slowness=5), id="arrival"),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_lambda_one_is_the_policy_gradient_whatever_the_critic_says(scheduler, gamma):
    mdp = random_mdp(0, gamma=gamma, early_end=0.3)
    assert error(expected(mdp, scheduler, wrong=1.0, lam=1.0), mdp.gradient()) < TOLERANCE


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_a_critic_that_is_right_gives_the_policy_gradient_at_any_lambda(scheduler, lam):
    mdp = random_mdp(1, gamma=0.9, early_end=0.3)
    assert error(expected(mdp, scheduler, wrong=0.0, lam=lam), mdp.gradient()) < TOLERANCE


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_trees_and_single_trajectories_have_the_same_mean(lam):
    mdp = random_mdp(2, gamma=0.9, early_end=0.2)
    chains, *trees = (
        expected(mdp, scheduler, wrong=1.0, lam=lam)
        for scheduler in (
            grow.depth_first(1, grow.nowhere),
            grow.depth_first(1, grow.at_depths({1: 2, 2: 2})),
            grow.depth_first(2, grow.uncertain),
        )
    )
    for gradient in trees:
        np.testing.assert_allclose(gradient, chains, atol=TOLERANCE)
    assert direction_error(chains, mdp.gradient()) > MARGIN  # the critic's error


def test_decisions_in_the_middle_of_a_turn():
    mdp = in_turns(random_mdp(1, depth=4, gamma=0.8, early_end=0.3), 2, 2)
    scheduler = grow.depth_first(1, grow.midway)
    assert error(expected(mdp, scheduler, wrong=1.0, lam=1.0), mdp.gradient()) < TOLERANCE
    assert error(expected(mdp, scheduler, wrong=0.0, lam=0.5), mdp.gradient()) < TOLERANCE
