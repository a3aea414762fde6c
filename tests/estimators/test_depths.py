"""The variances that are claimed, and their estimates, against sums over everything."""

import dataclasses
import math

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS
from bpo_jax.estimators.depths import Moments, by_turn
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import Mdp, random_mdp
from tests.estimators.trees import edge, flat, leaf, masked, tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    between: float
    within: float
    moments: Moments


def truth(mdp: Mdp) -> Truth:
    """Everything about the second of two turns, by the definitions."""
    states = [h for h in mdp.policy if len(h) == 1]
    reach = np.array([mdp.reach(h) for h in states])
    earned = {h: mdp.reward[h[:1]] + mdp.gamma * mdp.reward[h] for h in mdp.final}
    value = np.array([sum(mdp.policy[h][a] * earned[*h, a] for a in (0, 1)) for h in states])
    mean = float(reach @ value)
    g, s, within, mu, mu0, s_within = [], [], [], [], [], []
    for h, v in zip(states, value, strict=True):
        p, after = mdp.policy[h], [(*h, a) for a in (0, 1)]
        psi = [mdp.scores[mdp.edges[x]] for x in after]
        gap = [earned[x] - v for x in after]
        square = [float(x @ x) for x in psi]
        g.append(sum(p[a] * gap[a] * psi[a] for a in (0, 1)))
        s.append(p @ square)
        within.append(p @ np.square(gap))
        s_within.append(s[-1] * within[-1])
        mu.append(p @ (square * np.square(gap)))
        mu0.append(p @ (square * np.square([earned[x] - mean for x in after])))
    whole = sum(r * x for r, x in zip(reach, g, strict=True))
    between, inside = float(reach @ (value - mean) ** 2), float(reach @ within)
    return Truth(
        between=between,
        within=inside,
        moments=Moments(
            mean_square=float(whole @ whole),
            state_square=float(reach @ [x @ x for x in g]),
            # With K = 2; E|psi A|^2 has E(S W) / (K - 1) in it.
            forked_square=float(reach @ mu + reach @ s_within),
            score_square=float(reach @ s),
            pair_square=float(reach @ mu0 + reach @ s * (between + inside)),
        ),
    )


def block(mdp: Mdp, grown, result) -> np.ndarray:
    """The part of a gradient estimate that comes from the second turn."""
    mass = np.zeros(len(mdp.edges))
    weights = (result.coefficient * result.advantage).tolist()
    for action, weight in zip(grown.actions(), weights, strict=True):
        (number,) = action.info["edges"]
        second = len(list(mdp.edges)[number]) == 2
        mass[number] += weight * second
    return mass @ mdp.scores


def enumerated_variance(mdp: Mdp, scheduler) -> float:
    """Of that part, summed over parameters; bpo is leave-one-out on flat trees as well."""
    square, mean = 0.0, 0.0
    for probability, grown in mdp_lib.outcomes(mdp, scheduler):
        x = block(mdp, grown, ALGORITHMS["bpo"].estimate(grown, gamma=mdp.gamma))
        square += probability * float(x @ x)
        mean = mean + probability * x
    return square - float(mean @ mean)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("roots, siblings", [(1, 2), (2, 2), (1, 3), (2, 3)])
def test_the_gradients_variance_with_forks_is_the_formula(roots, siblings, seed):
    mdp = random_mdp(seed, depth=2, gamma=0.9)
    exact = truth(mdp).moments
    s_within = exact.forked_square - _mu(mdp)
    exact = dataclasses.replace(exact, forked_square=_mu(mdp) + s_within / (siblings - 1))
    scheduler = grow.depth_first(roots, grow.at_depths({1: siblings}))
    assert enumerated_variance(mdp, scheduler) == pytest.approx(
        exact.forked_variance(roots, siblings), abs=1e-12
    )


def _mu(mdp: Mdp) -> float:
    total = 0.0
    for h in mdp.final:
        psi = mdp.scores[mdp.edges[h]]
        gap = mdp.gamma * (mdp.reward[h] - mdp.value(h[:-1]))
        total += mdp.reach(h) * float(psi @ psi) * gap**2
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("returns", [2, 3, 4])
def test_the_gradients_variance_without_forks_is_the_formula(returns, seed):
    mdp = random_mdp(seed, depth=2, gamma=0.9)
    exact = truth(mdp)
    formula = exact.moments.flat_variance(returns, exact.between + exact.within)
    scheduler = grow.depth_first(returns, grow.nowhere)
    assert enumerated_variance(mdp, scheduler) == pytest.approx(formula, abs=1e-12)


def scores_of(mdp: Mdp, grown) -> np.ndarray:
    return np.stack([mdp.scores[a.info["edges"][0]] for a in grown.actions()])


@pytest.mark.parametrize("rule", [{1: 2}, {1: 2, 2: 2}])
def test_every_estimate_is_right_in_the_mean_whatever_forks_lie_below(rule):
    # The third turn, where there is one, earns nothing.
    mdp = random_mdp(1, depth=2, gamma=0.9)
    expected = truth(mdp)
    if 2 in rule:
        mdp = _longer(mdp)
    total = np.zeros(7)
    scheduler = grow.depth_first(2, grow.at_depths(rule))
    for probability, grown in mdp_lib.outcomes(mdp, scheduler):
        found = by_turn([grown], gamma=mdp.gamma, scores=[scores_of(mdp, grown)])[0]
        assert (found.turn, found.forks, found.states, found.siblings) == (1, 2, 2.0, 2.0)
        numbers = [found.between, found.within, *dataclasses.astuple(found.moments)]
        total += probability * np.array(numbers)
    wanted = [expected.between, expected.within, *dataclasses.astuple(expected.moments)]
    # Longer or not, the second turn's scores have the same inner products.
    np.testing.assert_allclose(total, wanted, atol=1e-12)


def _longer(mdp: Mdp) -> Mdp:
    """The same problem with a turn at the end in which there is no choice."""
    policy, reward = dict(mdp.policy), dict(mdp.reward)
    final = set()
    for h in mdp.final:
        policy[h] = np.array([1.0])
        reward[*h, 0] = 0.0
        final.add((*h, 0))
    return dataclasses.replace(mdp, policy=policy, reward=reward, final=frozenset(final))


def test_the_two_comparisons_may_disagree():
    # Squares of advantages are lower with forks, the gradient's variance is not.
    disagree = 0
    for seed in range(12):
        exact = truth(random_mdp(seed, depth=2, gamma=1.0))
        states, siblings = 2, 2
        n = states * siblings
        squares = (
            exact.within * siblings / (siblings - 1),
            (exact.between + exact.within) * n / (n - 1),
        )
        variances = (
            exact.moments.forked_variance(states, siblings),
            exact.moments.flat_variance(n, exact.between + exact.within),
        )
        disagree += (squares[0] < squares[1]) != (variances[0] < variances[1])
    assert 0 < disagree < 12


def test_turns_are_told_apart_and_named_by_the_turns_before():
    lower = edge(edge(leaf(1.0), leaf(3.0)), leaf(0.0), reward=1.0)
    first, second = by_turn([tree(lower, edge(leaf(2.0), leaf(2.0)))])
    assert (first.turn, first.forks, first.returns) == (1, 2, 5.0)
    # Children earn 1 + 1 (on along the first) and 1 + 0; 2 and 2.
    assert first.within == pytest.approx((0.5 + 0.0) / 2)
    assert first.between == pytest.approx(np.var([1.5, 2.0], ddof=1) - 0.25 / 2)
    assert (second.turn, second.forks, second.within) == (2, 1, 2.0)
    assert math.isnan(second.between)
    assert math.isnan(second.metrics()["rho"])


def test_children_that_were_lost_are_left_out():
    (found,) = by_turn([tree(edge(leaf(1.0), masked(), leaf(3.0)), edge(leaf(1.0), masked()))])
    assert (found.forks, found.siblings, found.within) == (1, 2.0, 2.0)


def test_nothing_is_said_of_trees_without_forks():
    assert by_turn([flat([1.0, 2.0], length=3)]) == []


def test_metrics_name_both_sides_of_both_comparisons():
    grown = tree(edge(leaf(1.0), leaf(3.0)), edge(leaf(0.0), leaf(4.0)))
    (plain,) = by_turn([grown])
    (scored,) = by_turn([grown], scores=[np.eye(6)])
    assert plain.metrics()["advantage_square_forked"] == pytest.approx(5.0 * 2)
    assert plain.metrics()["advantage_square_flat"] == pytest.approx(5.0 * 4 / 3)
    assert set(scored.metrics()) - set(plain.metrics()) == {
        "gradient_variance_forked", "gradient_variance_flat",
    }  # fmt: skip
