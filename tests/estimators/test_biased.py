"""What must not be done: each of these looks harmless and points somewhere else than the gradient.

They are here so that nobody puts one back for its convenience. Most are measured by the sine of the
angle to the gradient, which no rescaling could mend. Every instance is one that can fail: the same
scheme may be right by luck elsewhere. The margin is far above rounding (1e-10 when unbiased).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from bpo_jax.estimators import ALGORITHMS, Estimate, Shrinkage, solve
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import (
    Mdp,
    attach,
    coin,
    direction_error,
    error,
    finish,
    history_of,
    in_turns,
    random_mdp,
    sample,
    start,
)
from bpo_jax.estimators.values import others_mean
from bpo_jax.tree import Tree

MARGIN = 0.02
"""Relative error that counts as wrong."""


def bpo(mdp: Mdp, **settings) -> mdp_lib.Estimator:
    return functools.partial(ALGORITHMS["bpo"].estimate, gamma=mdp.gamma, **settings)


def misses(mdp: Mdp, scheduler: mdp_lib.Scheduler, estimator: mdp_lib.Estimator) -> float:
    expected = mdp_lib.expect(mdp, scheduler, estimator)
    return direction_error(expected.gradient, mdp.gradient())


def fork_along(mdp: Mdp, decision):
    """One fresh sibling at a decision of a finished backbone, followed to its end."""
    yield from finish(mdp, (yield from sample(mdp, decision)))


# --- where to branch ----------------------------------------------------------------------------


def test_choosing_the_most_uncertain_boundary_of_a_finished_backbone():
    def post_hoc(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)
        for _ in range(2):
            backbone = yield from finish(mdp, (yield from sample(mdp, top)))
            boundaries = [a.next for a in backbone if a.next is not None]
            yield from fork_along(mdp, max(boundaries, key=lambda d: mdp.entropy(history_of(d))))
        return Tree(task_id="post-hoc", root=top)

    mdp = random_mdp(1)
    assert misses(mdp, post_hoc, bpo(mdp)) > MARGIN


def test_choosing_the_boundary_by_the_surprise_of_the_action_that_was_drawn():
    def surprised(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)

        def descend(action):
            if action.next is None:
                return
            child = yield from sample(mdp, action.next)
            probability = mdp.policy[history_of(action.next)][child.info["choice"]]
            yield from descend(child)
            if probability < 0.5:
                yield from fork_along(mdp, action.next)

        for _ in range(2):
            yield from descend((yield from sample(mdp, top)))
        return Tree(task_id="surprise", root=top)

    mdp = random_mdp(0)
    assert misses(mdp, surprised, bpo(mdp)) > MARGIN


def test_a_uniformly_chosen_boundary_of_a_finished_backbone_of_variable_length():
    def post_hoc(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)
        for _ in range(2):
            backbone = yield from finish(mdp, (yield from sample(mdp, top)))
            boundaries = [a.next for a in backbone if a.next is not None]
            if boundaries:
                which = yield np.full(len(boundaries), 1 / len(boundaries))
                yield from fork_along(mdp, boundaries[which])
        return Tree(task_id="uniform", root=top)

    mdp = random_mdp(2, early_end=0.4)
    assert misses(mdp, post_hoc, bpo(mdp)) > MARGIN


# --- where to cut a turn, and how to sample -----------------------------------------------------


def cut_at(which: Callable[[Iterable[int]], int]) -> mdp_lib.Scheduler:
    """Samples a whole turn, then forks it after the marker that `which` picks of all in it."""

    def grow_tree(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)
        for _ in range(2):
            turn: list[int] = []
            while not turn or tuple(turn) in mdp.within:
                turn.append((yield mdp.policy[tuple(turn)]))
            markers = [i + 1 for i, token in enumerate(turn[:-1]) if token == mdp.marker]
            if not markers:
                yield from finish(mdp, attach(mdp, top, *turn))
                continue
            cut = which(markers)
            thought = attach(mdp, top, *turn[:cut])
            yield from finish(mdp, attach(mdp, thought.next, *turn[cut:]))
            yield from fork_along(mdp, thought.next)
        return Tree(task_id="cut", root=top)

    return grow_tree


def test_forking_a_turn_at_its_last_marker_instead_of_its_first():
    # That it is the last says what was sampled after it; that it is the first does not.
    mdp = in_turns(random_mdp(1, depth=4, early_end=0.2), 3, 1)
    first = mdp_lib.expect(mdp, cut_at(min), bpo(mdp)).gradient
    assert error(first, mdp.gradient()) < 1e-10
    assert misses(mdp, cut_at(max), bpo(mdp)) > MARGIN


def test_sampling_with_top_p_what_is_scored_without():
    def nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
        likeliest = np.argsort(-p)
        kept = np.zeros_like(p)
        kept[likeliest] = np.cumsum(p[likeliest]) - p[likeliest] < top_p
        return kept * p / np.sum(kept * p)

    def truncated(top_p: float) -> Mdp:
        policy = {history: nucleus(p, top_p) for history, p in mdp.policy.items()}
        return dataclasses.replace(mdp, policy=policy)

    def estimated(top_p: float) -> np.ndarray:
        scheduler = grow.depth_first(2, grow.at_depths({1: 2}))
        return mdp_lib.expect(mdp, lambda _: scheduler(truncated(top_p)), bpo(mdp)).gradient

    mdp = random_mdp(0, depth=2, actions=3)
    assert error(estimated(1.0), mdp.gradient()) < 1e-10
    assert direction_error(estimated(0.8), mdp.gradient()) > MARGIN


# --- how to weigh -------------------------------------------------------------------------------


def test_counting_every_edge_equally_where_branching_adapts_to_the_state():
    mdp = random_mdp(0)
    assert misses(mdp, grow.depth_first(2, grow.uncertain), bpo(mdp, flow_exponent=0.0)) > MARGIN


def test_counting_every_leaf_equally_where_branching_adapts_to_the_state():
    mdp = random_mdp(0)

    def by_leaves(tree: Tree) -> Estimate:
        solved = solve(tree, mdp.gamma)
        below = solved.leaf.astype(float)
        for i in reversed(range(len(below))):
            if solved.parent[i] >= 0:
                below[solved.parent[i]] += below[i]
        return dataclasses.replace(
            bpo(mdp)(tree), coefficient=solved.discount * below / solved.leaf.sum()
        )

    assert misses(mdp, grow.depth_first(2, grow.uncertain), by_leaves) > MARGIN


def test_dividing_by_the_sum_of_the_same_trees_weights():
    mdp = random_mdp(5, early_end=0.4)

    def normalised(tree: Tree) -> Estimate:
        result = bpo(mdp)(tree)
        return dataclasses.replace(
            result, coefficient=result.coefficient / result.coefficient.sum()
        )

    assert misses(mdp, grow.depth_first(2, grow.nowhere), normalised) > MARGIN


# --- what to compare with -----------------------------------------------------------------------


def test_a_mean_that_includes_the_sibling_itself_shrinks_the_gradient():
    mdp = random_mdp(1)

    def self_including(tree: Tree) -> Estimate:
        solved, result = solve(tree, mdp.gamma), bpo(mdp)(tree)
        own = (solved.siblings - 1) / solved.siblings
        advantage = np.where(
            solved.siblings > 1, (solved.q - others_mean(solved)) * own, result.advantage
        )
        return dataclasses.replace(result, advantage=advantage)

    scheduler = grow.depth_first(2, grow.at_depths({1: 2}))
    expected = mdp_lib.expect(mdp, scheduler, self_including).gradient
    assert error(expected, mdp.gradient()) > MARGIN
    assert np.linalg.norm(expected) < (1 - MARGIN) * np.linalg.norm(mdp.gradient())


def test_dividing_by_the_deviation_of_returns_that_take_many_values():
    mdp = random_mdp(1)
    grpo = functools.partial(ALGORITHMS["grpo"].estimate, gamma=mdp.gamma)
    assert misses(mdp, grow.depth_first(3, grow.nowhere), grpo) > MARGIN


def test_shrinkage_estimated_on_the_same_tree():
    mdp = random_mdp(1, depth=2, actions=3)

    def adaptive(tree: Tree) -> Estimate:
        solved = solve(tree, mdp.gamma)
        forks = [solved.q[solved.parent == i] for i in np.flatnonzero(~solved.leaf)]
        within = float(np.mean([np.var(f, ddof=1) for f in forks]))
        fitted = Shrinkage(between=0.1, inherited=0.1, within=within)
        return bpo(mdp, shrinkage=(fitted,))(tree)

    scheduler = grow.depth_first(2, grow.at_depths({1: 2}))
    assert misses(mdp, scheduler, adaptive) > MARGIN


# --- budgets and failures -----------------------------------------------------------------------


def test_a_sibling_only_if_the_first_subtree_left_budget_for_it():
    def leftover(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)

        for _ in range(2):
            first = yield from sample(mdp, top)
            used = len((yield from finish(mdp, first)))
            if first.next is not None and used < 4:
                yield from fork_along(mdp, first.next)
        return Tree(task_id="leftover", root=top)

    mdp = random_mdp(0, depth=4, early_end=0.4)
    assert misses(mdp, leftover, bpo(mdp)) > MARGIN


def test_a_shared_budget_that_cuts_rollouts_short():
    def cutting(mdp: Mdp) -> mdp_lib.Draws:
        top, left = start(mdp), 6
        for _ in range(2):
            action = yield from sample(mdp, top)
            left -= 1
            while action.next is not None and left > 0:
                action = yield from sample(mdp, action.next)
                left -= 1
            if action.next is not None:
                action.next, action.end = None, "truncated"
        return Tree(task_id="cut", root=top)

    mdp = random_mdp(0, depth=4, early_end=0.3, terminal_only=True)
    assert misses(mdp, cutting, bpo(mdp)) > MARGIN


def test_keeping_the_fastest_two_of_three_roots():
    def racing(mdp: Mdp) -> mdp_lib.Draws:
        top, lengths = start(mdp), []
        for _ in range(3):
            lengths.append(len((yield from finish(mdp, (yield from sample(mdp, top))))))
        top.actions.pop(int(np.argmax(lengths)))
        return Tree(task_id="race", root=top)

    mdp = random_mdp(2, early_end=0.4)
    assert misses(mdp, racing, bpo(mdp)) > MARGIN


def test_sampling_until_one_succeeds():
    def persistent(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)
        for _ in range(4):
            path = yield from finish(mdp, (yield from sample(mdp, top)))
            if path[-1].reward > 0.8 and len(top.actions) >= 2:
                break
        return Tree(task_id="persistent", root=top)

    mdp = random_mdp(4, depth=2, terminal_only=True)
    assert misses(mdp, persistent, bpo(mdp)) > MARGIN


def test_a_fresh_action_after_a_failure_that_depends_on_the_action():
    def retrying(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)

        def step(decision):
            choice = yield mdp.policy[history_of(decision)]
            if (yield from coin(0.7 if choice == 0 else 0.0)):
                choice = yield mdp.policy[history_of(decision)]
            return attach(mdp, decision, choice)

        for _ in range(2):
            action = yield from step(top)
            while action.next is not None:
                action = yield from step(action.next)
        return Tree(task_id="retry", root=top)

    mdp = random_mdp(7, depth=2)
    assert misses(mdp, retrying, bpo(mdp)) > MARGIN
