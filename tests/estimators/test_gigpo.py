"""GiGPO: the policy gradient, and beside it steps compared across trajectories."""

import dataclasses
import functools

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS, Estimate, solve
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import Mdp, direction_error, error, random_mdp
from bpo_jax.tree import Decision, Tree
from tests.estimators.trees import edge, flat, leaf, masked, tree

TOLERANCE, MARGIN = 1e-10, 0.02


def gigpo(grown, **settings):
    return ALGORITHMS["gigpo"].estimate(grown, **settings)


def seen(action, observation: str):
    """The action, with what is read after it."""
    action.next.observation = observation
    return action


def test_without_a_step_term_it_is_rloo():
    grown = flat([1.0, 4.0, 7.0], length=3)
    rloo = ALGORITHMS["rloo"].estimate(grown)
    result = gigpo(grown, omega=0.0)
    np.testing.assert_allclose(result.advantage, rloo.advantage)
    np.testing.assert_allclose(result.coefficient, rloo.coefficient)


def test_steps_are_compared_with_others_at_the_same_observation():
    # Two trajectories come to the kitchen, at different times; the third does not.
    first = seen(edge(leaf(8.0)), "kitchen")
    second = seen(edge(seen(edge(leaf(2.0)), "kitchen")), "hall")
    third = seen(edge(leaf(5.0)), "garden")
    step = gigpo(tree(first, second, third), gamma=0.5).advantage
    step -= gigpo(tree(first, second, third), omega=0.0).advantage
    start = np.array([4.0, 0.5, 2.5])  # Q of the roots at gamma 1/2
    others = (start.sum() - start) / 2
    np.testing.assert_allclose(step[[0, 2, 5]], start - others)
    np.testing.assert_allclose(step[[1, 4]], [8.0 - 2.0, 2.0 - 8.0])
    np.testing.assert_allclose(step[[3, 6]], 0.0)


def test_omega_weighs_the_step_term():
    grown = flat([1.0, 4.0], length=2)
    zero, one, three = (gigpo(grown, omega=w).advantage for w in (0.0, 1.0, 3.0))
    np.testing.assert_allclose(three - zero, 3.0 * (one - zero))


def test_a_trajectory_that_returns_to_an_observation_is_not_compared_with_itself():
    loop = seen(edge(seen(edge(leaf(3.0)), "hall")), "hall")
    other = seen(edge(leaf(1.0)), "hall")
    both = [gigpo(tree(loop, other), gamma=1.0, omega=w).advantage for w in (1.0, 0.0)]
    # Its two visits are compared with the other's one; that one with the mean of both.
    np.testing.assert_allclose((both[0] - both[1])[[1, 2, 4]], [3.0 - 1.0, 3.0 - 1.0, 1.0 - 3.0])
    alone = seen(edge(seen(edge(leaf(3.0)), "hall")), "hall")
    np.testing.assert_allclose(gigpo(tree(alone)).advantage, 3.0)


def test_actions_above_and_below_share_trajectories_and_siblings_do_not():
    fork = seen(edge(seen(edge(leaf(6.0)), "hall"), leaf(2.0)), "hall")
    both = [gigpo(tree(fork), gamma=1.0, omega=w).advantage for w in (1.0, 0.0)]
    #  fork -> {a -> b: 6; c: 2}, all three taken in the hall
    np.testing.assert_allclose((both[0] - both[1])[1:], [6.0 - 2.0, 6.0 - 2.0, 2.0 - 6.0])


def test_others_count_by_their_flow():
    forked = seen(edge(leaf(0.0), leaf(4.0), leaf(5.0)), "hall")
    single = seen(edge(leaf(9.0)), "hall")
    both = [gigpo(tree(forked, single), gamma=1.0, omega=w).advantage for w in (1.0, 0.0)]
    assert (both[0] - both[1])[5] == pytest.approx(9.0 - 3.0)
    assert (both[0] - both[1])[1] == pytest.approx(0.0 - (4.0 / 6 + 5.0 / 6 + 9.0 / 2) / (5 / 6))


def test_inside_a_turn_an_action_is_compared_with_its_siblings_alone():
    parts = [edge(leaf(1.0), leaf(3.0), mid_turn=True), edge(leaf(8.0), mid_turn=True)]
    both = [gigpo(tree(*parts), gamma=1.0, omega=w).advantage for w in (1.0, 0.0)]
    np.testing.assert_allclose((both[0] - both[1])[[1, 2, 4]], [-2.0, 2.0, 0.0])


def test_what_was_lost_is_compared_with_nothing():
    result = gigpo(tree(leaf(1.0), masked(), leaf(4.0)), gamma=1.0)
    np.testing.assert_allclose(result.advantage, [-6.0, 0.0, 6.0])
    np.testing.assert_allclose(result.coefficient, [0.5, 0.0, 0.5])


def test_a_negative_omega_is_refused():
    with pytest.raises(ValueError, match="omega is -1"):
        gigpo(flat([1.0]), omega=-1.0)


# --- exactly ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [grow.nowhere, grow.uncertain])
@pytest.mark.parametrize("seed", range(3))
def test_without_a_step_term_it_is_the_policy_gradient(seed, rule):
    mdp = random_mdp(seed, gamma=1.0, early_end=0.2)
    scheduler = grow.depth_first(2, rule)
    estimator = functools.partial(gigpo, omega=0.0)
    estimate = mdp_lib.expect(mdp, scheduler, estimator).gradient
    assert error(estimate, mdp.gradient()) < TOLERANCE


@pytest.mark.parametrize("omega", [1.0, 0.5])
@pytest.mark.parametrize("roots", [2, 3])
def test_the_step_term_weighs_states_by_whether_another_trajectory_comes_there(roots, omega):
    mdp = random_mdp(3, gamma=0.8, early_end=0.2, depth=3)
    estimator = functools.partial(gigpo, gamma=mdp.gamma, omega=omega)
    estimate = mdp_lib.expect(mdp, grow.depth_first(roots, grow.nowhere), estimator).gradient

    undiscounted = dataclasses.replace(mdp, gamma=1.0)
    mass = np.zeros(len(mdp.edges))
    for after, edge_ in mdp.edges.items():
        company = 1.0 - (1.0 - mdp.reach(after[:-1])) ** (roots - 1)
        mass[edge_] = mdp.reach(after) * company * mdp.action_value(after)
    step = mass @ mdp.scores
    np.testing.assert_allclose(estimate, undiscounted.gradient() + omega * step, atol=TOLERANCE)
    assert direction_error(estimate, undiscounted.gradient()) > MARGIN


def test_a_baseline_that_includes_the_trajectorys_other_visits_points_elsewhere():
    def looping(seed: int) -> Mdp:
        # Two rooms, whose doors are the actions: one may come back to a room.
        mdp = random_mdp(seed, gamma=1.0)
        return dataclasses.replace(mdp, observe=lambda history: f"room {sum(history) % 2}")

    def self_including(tree_: Tree) -> Estimate:
        solved, result = solve(tree_, 1.0), gigpo(tree_, gamma=1.0, omega=0.0)
        rooms = [d.observation for d in tree_.decisions()]
        room = np.asarray([rooms[d] == rooms[0] for d in solved.decision])
        mean = np.array([solved.q[room == here].mean() for here in room])
        return dataclasses.replace(result, advantage=solved.q - mean)

    def without_baseline(tree_: Tree) -> Estimate:
        return dataclasses.replace(gigpo(tree_, omega=0.0), advantage=solve(tree_, 1.0).q)

    def step_alone(tree_: Tree) -> Estimate:
        whole, episode = gigpo(tree_, gamma=1.0), gigpo(tree_, gamma=1.0, omega=0.0)
        return dataclasses.replace(whole, advantage=whole.advantage - episode.advantage)

    mdp, scheduler = looping(0), grow.depth_first(2, grow.nowhere)
    expect = functools.partial(mdp_lib.expect, mdp, scheduler)
    reward_to_go = expect(without_baseline).gradient
    assert error(reward_to_go, mdp.gradient()) < TOLERANCE
    assert direction_error(expect(self_including).gradient, mdp.gradient()) > MARGIN
    # The start's room is visited by both trajectories at once, so its logits have all partners.
    start = [mdp.edges[h] for h in mdp.edges if len(h) == 1]
    np.testing.assert_allclose(
        expect(step_alone).gradient[start], mdp.gradient()[start], atol=TOLERANCE
    )


def test_the_start_is_shared_by_all_roots_and_has_an_observation_too():
    grown = tree(leaf(1.0), leaf(3.0))
    assert isinstance(grown.root, Decision)
    np.testing.assert_allclose(gigpo(grown, gamma=1.0).advantage, [-4.0, 4.0])
