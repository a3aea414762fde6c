"""The published recipe does what it says, what is wrong with it included: both are to be kept."""

import functools

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import Mdp, direction_error, error, random_mdp
from tests.estimators.trees import edge, flat, leaf, masked, tree

TOLERANCE, MARGIN = 1e-10, 0.02


def paper(grown, **settings):
    return ALGORITHMS["bpo_paper"].estimate(grown, **settings)


def expected(mdp: Mdp, scheduler, **settings) -> np.ndarray:
    estimator = functools.partial(paper, gamma=mdp.gamma, **settings)
    return mdp_lib.expect(mdp, scheduler, estimator).gradient


def above_every_fork(mdp: Mdp, gradient: np.ndarray) -> np.ndarray:
    """The part of a gradient in the logits of the start, where no fork ever is."""
    return gradient[[mdp.edges[h] for h in mdp.edges if len(h) == 1]]


# --- by hand ------------------------------------------------------------------------------------


def two_forks():
    """a; fork {b, fresh 1}; c; fork {d: 7, fresh {e: 2; then f: 3}}."""
    lower = edge(edge(leaf(7.0), edge(leaf(3.0), reward=2.0)))
    return tree(edge(edge(lower, leaf(1.0))))


def test_siblings_are_compared_by_their_own_trajectories_and_pass_it_on_to_the_next_fork():
    a, b, c, d, e, f, g, fresh = paper(two_forks(), lam=0.0).advantage
    # The backbone earns 7, the fresh sibling below 2 + 3, the one above 1.
    assert (a, b) == (0.0, 0.0)
    assert (c, d) == (7.0 - 1.0, 7.0 - 1.0)
    assert e == 7.0 - 5.0
    assert (f, g) == (5.0 - 7.0, 5.0 - 7.0)
    assert fresh == 1.0 - 7.0


def test_the_backbones_advantage_is_copied_up_and_fades_by_lambda_at_every_step():
    a, b, c, d, *_ = paper(two_forks(), lam=0.5).advantage
    assert d == pytest.approx(6.0 + 0.5 * 2.0)
    assert c == pytest.approx(6.0 + 0.25 * 2.0)
    assert b == pytest.approx(0.5 * 6.0 + 0.125 * 2.0)
    assert a == pytest.approx(0.25 * 6.0 + 0.0625 * 2.0)


def test_every_action_counts_by_the_number_of_returns():
    np.testing.assert_allclose(paper(two_forks()).coefficient, 1 / 3)


def test_a_lost_sibling_is_compared_with_nothing():
    result = paper(tree(edge(leaf(1.0), leaf(4.0), masked())), lam=0.0)
    np.testing.assert_allclose(result.advantage, [0.0, -3.0, 3.0, 0.0])
    np.testing.assert_allclose(result.coefficient, [0.5, 0.5, 0.5, 0.0])


def test_a_lost_backbone_copies_nothing():
    result = paper(tree(edge(masked(), leaf(4.0), leaf(6.0))), lam=0.5)
    np.testing.assert_allclose(result.advantage, [0.0, 0.0, -2.0, 2.0])


def test_a_backbone_without_forks_teaches_nothing():
    np.testing.assert_array_equal(paper(flat([3.0], length=3)).advantage, 0.0)


@pytest.mark.parametrize("settings", [{"lam": 1.5}, {"propagate": "leaves"}])
def test_settings_out_of_range_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        paper(flat([1.0]), **settings)


# --- exactly ------------------------------------------------------------------------------------


def test_all_siblings_copies_cancel_above_the_first_fork_in_every_outcome():
    mdp = random_mdp(0, early_end=0.2)
    forked = 0
    for _, grown in mdp_lib.outcomes(mdp, grow.post_hoc_top(1, forks=2, fresh=2)):
        advantage = paper(grown, propagate="siblings").advantage
        forked += len(grown.forks()) > 0
        np.testing.assert_allclose(advantage[0], 0.0, atol=1e-14)  # rounding alone
    assert forked > 100


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [grow.at_depths({1: 2}), grow.uncertain, grow.at_depths({2: 3})])
def test_the_backbones_copy_has_mean_zero_where_forks_are_predictable(seed, rule):
    mdp = random_mdp(seed)
    scheduler = grow.along_backbone(1, rule)
    faded, plain = (expected(mdp, scheduler, lam=lam) for lam in (0.95, 0.0))
    # A fork's copy goes to actions above it alone, so these are the only ones it could move.
    np.testing.assert_allclose(faded, plain, atol=TOLERANCE)
    np.testing.assert_allclose(above_every_fork(mdp, faded), 0.0, atol=TOLERANCE)


def test_chosen_after_the_fact_the_backbones_copy_is_not_zero_and_makes_the_bias_larger():
    mdp = random_mdp(0, gamma=1.0, early_end=0.2)
    scheduler = grow.post_hoc_top(1, forks=1, fresh=1)
    faded, plain = (expected(mdp, scheduler, lam=lam) for lam in (0.95, 0.0))
    assert np.abs(above_every_fork(mdp, faded)).max() > MARGIN
    sizes = [direction_error(g, mdp.gradient()) for g in (plain, faded)]
    assert sizes == pytest.approx([0.325, 0.711], abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_the_start_is_missing_even_where_forks_are_predictable(seed):
    mdp = random_mdp(seed, gamma=1.0)
    estimate = expected(mdp, grow.along_backbone(1, grow.everywhere(2)))
    missing = above_every_fork(mdp, mdp.gradient())
    exact = mdp.gradient()
    assert error(estimate, exact) > 0.9 * np.linalg.norm(missing) / np.linalg.norm(exact)


def test_at_a_predictable_fork_the_siblings_give_the_gradient_of_that_state():
    mdp = random_mdp(1, gamma=1.0)
    estimate = expected(mdp, grow.along_backbone(1, grow.at_depths({1: 4})))
    forked = [mdp.edges[h] for h in mdp.edges if len(h) == 2]
    np.testing.assert_allclose(estimate[forked], mdp.gradient()[forked], atol=TOLERANCE)
