"""Forks chosen after the fact give the gradient when each is divided by its probability."""

import functools

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import coin, direction_error, error, in_turns, random_mdp
from tests.estimators.trees import edge, flat, leaf, masked, tree

TOLERANCE, MARGIN = 1e-10, 0.02


def horvitz_thompson(grown, **settings):
    return ALGORITHMS["post_hoc_ht"].estimate(grown, **settings)


def chosen(action, probability: float):
    """The action, with the probability that the decision after it was forked."""
    action.next.inclusion = probability
    return action


def test_a_fork_counts_by_its_probability_and_takes_the_backbones_term_away():
    # a; fork {b: 6; fresh c, then d: 1; fresh e: 3}, beside a root that earns 2
    grown = tree(chosen(edge(leaf(6.0), edge(leaf(1.0)), leaf(3.0)), 0.25), leaf(2.0))
    result = horvitz_thompson(grown)
    a, b, c, d, e, other = result.advantage
    assert (a, b, other) == (6.0 - 2.0, 6.0 - 2.0, 2.0 - 6.0)
    assert (c, d, e) == (1.0 - (6.0 + 3.0) / 2, 0.0, 3.0 - (6.0 + 1.0) / 2)
    np.testing.assert_allclose(
        result.coefficient, np.array([1.0, 1 - 1 / 0.25, 1 / 0.25 / 2, 0.0, 1 / 0.25 / 2, 1.0]) / 2
    )


def test_with_one_fresh_sibling_the_backbones_return_is_its_baseline():
    grown = tree(chosen(edge(leaf(6.0), leaf(1.0)), 0.5))
    np.testing.assert_allclose(horvitz_thompson(grown, baseline=4.0).advantage, [2.0, 2.0, -5.0])


def test_without_forks_it_is_bpo_on_flat_trees():
    grown = flat([1.0, 4.0, 7.0], length=3)
    bpo = ALGORITHMS["bpo"].estimate(grown, gamma=0.9)
    result = horvitz_thompson(grown, gamma=0.9)
    np.testing.assert_allclose(result.advantage, bpo.advantage)
    np.testing.assert_allclose(result.coefficient, bpo.coefficient)


def test_a_lost_backbone_is_left_out_with_its_forks():
    grown = tree(chosen(edge(masked(), leaf(1.0)), 0.5), leaf(2.0), leaf(4.0))
    result = horvitz_thompson(grown)
    np.testing.assert_allclose(result.coefficient, [0.0, 0.0, 0.0, 0.5, 0.5])
    np.testing.assert_allclose(result.advantage, [0.0, 0.0, 0.0, -2.0, 2.0])


def test_a_fork_all_of_whose_fresh_siblings_were_lost_counts_as_not_chosen():
    grown = tree(chosen(edge(leaf(6.0), masked()), 0.5), leaf(2.0))
    np.testing.assert_allclose(horvitz_thompson(grown).coefficient, [0.5, 0.5, 0.0, 0.5])


@pytest.mark.parametrize("probability", [None, 0.0, 1.5])
def test_a_fork_without_a_probability_is_refused(probability):
    grown = tree(chosen(edge(leaf(6.0), leaf(1.0)), probability))
    with pytest.raises(ValueError, match=f"inclusion={probability}, expected the probability"):
        horvitz_thompson(grown)


def test_a_fork_below_a_fresh_sibling_is_refused():
    below = chosen(edge(leaf(1.0), leaf(2.0)), 0.5)
    with pytest.raises(ValueError, match="only backbones may fork"):
        horvitz_thompson(tree(chosen(edge(leaf(6.0), below), 0.5)))


def test_bpo_refuses_forks_that_were_chosen_after_the_fact():
    with pytest.raises(ValueError, match="post_hoc_ht"):
        ALGORITHMS["bpo"].estimate(tree(chosen(edge(leaf(6.0), leaf(1.0)), 0.5)))


def without_inclusion(grown, **settings):
    for decision in grown.decisions():
        decision.inclusion = None
    return ALGORITHMS["bpo"].estimate(grown, **settings)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "roots, fresh, size",
    [(1, 1, {"depth": 3}), (1, 2, {"depth": 3}), (2, 1, {"depth": 2, "actions": 3})],
)
def test_dividing_by_the_probability_gives_the_gradient(roots, fresh, size, seed):
    mdp = random_mdp(seed, early_end=0.2, gamma=0.8, **size)
    scheduler = grow.post_hoc_coins(roots, fresh=fresh)
    estimator = functools.partial(horvitz_thompson, gamma=mdp.gamma, baseline=0.7)
    expected = mdp_lib.expect(mdp, scheduler, estimator).gradient
    assert error(expected, mdp.gradient()) < TOLERANCE

    # On the same trees the plain estimate is biased: the choice has seen what came after.
    plain = functools.partial(without_inclusion, gamma=mdp.gamma, baseline=0.7)
    biased = mdp_lib.expect(mdp, scheduler, plain).gradient
    assert direction_error(biased, mdp.gradient()) > MARGIN


def test_parts_of_turns():
    mdp = in_turns(random_mdp(0, depth=4, gamma=0.8, early_end=0.3), 2, 2)
    estimator = functools.partial(horvitz_thompson, gamma=mdp.gamma, baseline=0.7)
    expected = mdp_lib.expect(mdp, grow.post_hoc_coins(1, fresh=1), estimator).gradient
    assert error(expected, mdp.gradient()) < TOLERANCE


def test_fresh_siblings_that_are_lost_whatever_they_did_change_nothing_in_the_mean():
    def scheduler(mdp):
        grown = yield from grow.post_hoc_coins(1, fresh=1)(mdp)
        for path in grown.paths():
            if path[-1] is not grown.leaves()[0] and (yield from coin(0.4)):
                path[-1].end, path[-1].reward = "masked", 0.0
        return grown

    mdp = random_mdp(1, depth=3, gamma=0.8)
    estimator = functools.partial(horvitz_thompson, gamma=mdp.gamma, baseline=0.7)
    expected = mdp_lib.expect(mdp, scheduler, estimator).gradient
    assert error(expected, mdp.gradient()) < TOLERANCE


def test_choosing_the_most_uncertain_ones_has_no_probability_to_divide_by():
    # Given the backbone it is certain which are chosen, and the others can never be.
    mdp = random_mdp(0, gamma=1.0, early_end=0.2)

    def as_if_by_coin(grown):
        for decision in grown.forks():
            decision.inclusion = 1.0
        return horvitz_thompson(grown, baseline=0.7)

    scheduler = grow.post_hoc_top(1, forks=1, fresh=1)
    biased = mdp_lib.expect(mdp, scheduler, as_if_by_coin).gradient
    assert error(biased, mdp.gradient()) > MARGIN
