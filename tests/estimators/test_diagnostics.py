"""What is logged about branching is what its formulas say it is."""

import math

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS, tree_diagnostics
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import random_mdp
from tests.estimators.trees import edge, flat, leaf, masked, tree


def measure(*trees, gamma=1.0, name="bpo"):
    estimates = [ALGORITHMS[name].estimate(t, gamma=gamma) for t in trees]
    return tree_diagnostics(trees, estimates, gamma=gamma)


def test_the_variance_split_by_hand():
    # Two roots fork after earning 1 and 0; counted from the start, siblings earn 3, 5 and 0, 2.
    result = measure(tree(edge(leaf(2.0), leaf(4.0), reward=1.0), edge(leaf(0.0), leaf(2.0))))
    within, between = 2.0, np.var([4.0, 1.0], ddof=1) - 2.0 / 2
    assert result["diag/W"] == pytest.approx(within)
    assert result["diag/B"] == pytest.approx(between)
    assert result["diag/rho"] == pytest.approx(between / (between + within))
    assert result["diag/advantage_square_forked"] == pytest.approx(within * 2)
    assert result["diag/advantage_square_flat"] == pytest.approx((between + within) * 4 / 3)
    assert result["diag/root_variance"] == pytest.approx(4.5)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_the_variance_split_is_unbiased(gamma):
    mdp = random_mdp(0, depth=2, gamma=gamma)
    between = within = 0.0
    for probability, grown in mdp_lib.outcomes(mdp, grow.depth_first(2, grow.at_depths({1: 2}))):
        result = measure(grown, gamma=gamma)
        between += probability * result["diag/B"]
        within += probability * result["diag/W"]
    totals = {h: mdp.reward[h] + gamma * mdp.value(h) for h in mdp.policy if len(h) == 1}
    reach = np.array([mdp.reach(h) for h in totals])
    states = np.array(list(totals.values()))
    assert between == pytest.approx(reach @ (states - reach @ states) ** 2, abs=1e-12)
    spread = sum(
        mdp.reach(h) * (gamma * (mdp.action_value(h) - mdp.value(h[:-1]))) ** 2
        for h in mdp.edges
        if len(h) == 2
    )
    assert within == pytest.approx(spread, abs=1e-12)


def test_squared_advantages_are_free_of_what_siblings_share():
    # E A^2 = W K / (K - 1) below a fork of K, (B + W) N / (N - 1) for N independent returns.
    mdp = random_mdp(1, depth=2, gamma=1.0, terminal_only=True)
    leaves = {h: mdp.reach(h) for h in mdp.final}
    within = sum(p * (mdp.reward[h] - mdp.value(h[:-1])) ** 2 for h, p in leaves.items())
    total = sum(p * (mdp.reward[h] - mdp.value()) ** 2 for h, p in leaves.items())
    bpo = ALGORITHMS["bpo"].estimate
    for siblings in (2, 3):
        square = 0.0
        scheduler = grow.depth_first(1, grow.at_depths({1: siblings}))
        for probability, grown in mdp_lib.outcomes(mdp, scheduler):
            square += probability * np.mean(bpo(grown).advantage[1:] ** 2)
        assert square == pytest.approx(within * siblings / (siblings - 1), abs=1e-12)
    square = 0.0
    for probability, grown in mdp_lib.outcomes(mdp, grow.depth_first(3, grow.nowhere)):
        square += probability * np.mean(bpo(grown).advantage ** 2)
    assert square == pytest.approx(total * 3 / 2, abs=1e-12)


def test_the_first_fork_left_whole_by_masking_is_the_one_that_counts():
    spoilt = edge(edge(leaf(1.0), leaf(5.0)), masked())
    result = measure(tree(spoilt, leaf(0.0)))
    assert result["diag/W"] == pytest.approx(8.0)
    assert math.isnan(result["diag/B"])


def test_what_cannot_be_measured_is_nan():
    result = measure(flat([1.0, 0.0]))
    missing = {k for k, v in result.items() if math.isnan(v)}
    assert missing == {
        "diag/B", "diag/W", "diag/rho",
        "diag/advantage_square_forked", "diag/advantage_square_flat",
    }  # fmt: skip
    assert all(math.isnan(v) for v in tree_diagnostics([], []).values())
    assert math.isnan(measure(tree(masked(), masked()))["diag/nondegenerate"])


def test_a_negative_estimate_of_between_counts_as_no_spread():
    same = edge(leaf(0.0), leaf(2.0))
    result = measure(tree(same, edge(leaf(0.0), leaf(2.0))))
    assert result["diag/B"] < 0.0
    assert result["diag/rho"] == 0.0


def test_the_share_of_actions_that_learn_leaves_masked_ones_out():
    result = measure(flat([1.0, 0.0]), flat([1.0, 1.0]), tree(masked(), leaf(0.0)))
    assert result["diag/nondegenerate"] == pytest.approx(2 / 5)
    assert result["diag/coefficient_sum"] == pytest.approx(1.0)


def test_trees_and_estimates_come_in_pairs():
    with pytest.raises(ValueError, match="1 trees but 0 estimates"):
        tree_diagnostics([flat([1.0])], [])
