"""BPO's expected gradient is the exact policy gradient, whatever a predictable scheduler does.

All expectations are sums over every outcome, in float64: agreement is to rounding, not sampling.
"""

import dataclasses
import functools

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS, Shrinkage
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import (
    Mdp,
    attach,
    coin,
    history_of,
    in_turns,
    random_mdp,
    sample,
    start,
)
from bpo_jax.tree import Tree

TOLERANCE = 1e-10


def check(mdp: Mdp, scheduler: mdp_lib.Scheduler, **settings) -> mdp_lib.Expectation:
    estimator = functools.partial(ALGORITHMS["bpo"].estimate, gamma=mdp.gamma, **settings)
    expected = mdp_lib.expect(mdp, scheduler, estimator)
    assert mdp_lib.error(expected.gradient, mdp.gradient()) < TOLERANCE
    assert expected.root_value == pytest.approx(mdp.value(), abs=TOLERANCE)
    return expected


@pytest.mark.parametrize("turns", [(), (2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_the_harness_agrees_with_a_finite_difference(seed, turns):
    mdp = random_mdp(seed, early_end=0.3)
    if turns:
        mdp = in_turns(mdp, *turns)
    step, numeric = 1e-5, []
    for after in mdp.edges:
        state, action = after[:-1], after[-1]
        values = []
        for sign in (1.0, -1.0):
            logits = np.log(mdp.policy[state])
            logits[action] += sign * step
            policy = mdp.policy | {state: np.exp(logits) / np.exp(logits).sum()}
            values.append(dataclasses.replace(mdp, policy=policy).value())
        numeric.append((values[0] - values[1]) / (2 * step))
    # Central differences in float64: the error is of order step ** 2 plus rounding / step.
    np.testing.assert_allclose(mdp.gradient(), numeric, atol=1e-8)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("roots", [2, 3])
def test_without_forks(roots, gamma):
    check(random_mdp(0, gamma=gamma, early_end=0.2), grow.depth_first(roots, grow.nowhere))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("terminal_only", [True, False])
def test_one_fork_per_root_at_a_fixed_depth(gamma, terminal_only):
    mdp = random_mdp(1, gamma=gamma, terminal_only=terminal_only)
    check(mdp, grow.depth_first(2, grow.at_depths({1: 2})))


def test_three_actions_and_three_siblings():
    mdp = random_mdp(2, depth=2, actions=3)
    check(mdp, grow.depth_first(2, grow.at_depths({1: 3})))


def test_depth_four_with_unforked_decisions_above_and_below_the_fork():
    check(random_mdp(3, depth=4, early_end=0.25), grow.depth_first(2, grow.at_depths({2: 2})))


def test_nested_forks():
    mdp = random_mdp(0, early_end=0.3)
    check(mdp, grow.depth_first(2, grow.at_depths({1: 2, 2: 2})))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param(grow.depth_first(2, grow.uncertain), id="depth-first"),
        pytest.param(grow.by_arrival(2, grow.uncertain, slowness=1), id="breadth-first"),
        pytest.param(grow.by_arrival(2, grow.uncertain, slowness=5), id="arrival"),
        pytest.param(grow.frontier_top(3, 1), id="top of the frontier"),
    ],
)
def test_forks_that_depend_on_the_state(seed, scheduler):
    check(random_mdp(seed, early_end=0.3), scheduler)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("order", ["depth-first", "breadth-first", "arrival"])
def test_budgets_that_limit_forks_and_are_charged_before_children_are_drawn(order, shared):
    rule = grow.budgeted(grow.at_depths({1: 2, 2: 2}), extra=1, shared=shared)
    scheduler = {
        "depth-first": grow.depth_first(2, rule),
        "breadth-first": grow.by_arrival(2, rule, slowness=1),
        "arrival": grow.by_arrival(2, rule, slowness=5),
    }[order]
    check(random_mdp(4, early_end=0.2), scheduler)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("order", ["depth-first", "arrival"])
def test_a_threshold_moved_by_the_returns_of_siblings_that_finished_earlier(order, seed):
    rule = grow.budgeted(grow.after_disappointment, extra=2, shared=True)
    scheduler = {
        "depth-first": grow.depth_first(2, rule),
        "arrival": grow.by_arrival(2, rule, slowness=5),
    }[order]
    check(random_mdp(seed, early_end=0.3), scheduler)


def test_shrinkage_with_constants_from_earlier_updates():
    shrinkage = (
        Shrinkage(between=0.3, inherited=0.2, within=0.6),
        Shrinkage(between=0.1, inherited=0.4, within=0.9),
    )
    mdp = random_mdp(5, early_end=0.3)
    check(mdp, grow.depth_first(2, grow.at_depths({1: 2, 2: 2})), shrinkage=shrinkage)
    adaptive = grow.budgeted(grow.after_disappointment, extra=2, shared=True)
    check(mdp, grow.by_arrival(2, adaptive, slowness=5), shrinkage=shrinkage[:1])


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_one_root_with_a_constant_baseline(baseline):
    mdp = random_mdp(6)
    check(mdp, grow.depth_first(1, grow.at_depths({1: 2, 2: 2})), baseline=baseline)
    check(mdp, grow.depth_first(1, grow.uncertain), baseline=baseline)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("turns", [(3, 1), (1, 3)])
@pytest.mark.parametrize("rule", [grow.nowhere, grow.midway])
def test_decisions_in_the_middle_of_a_turn_at_its_first_marker(rule, turns, gamma):
    mdp = in_turns(random_mdp(0, depth=4, gamma=gamma, early_end=0.3), *turns)
    check(mdp, grow.depth_first(2, rule))


@pytest.mark.parametrize("roots", [1, 2])
@pytest.mark.parametrize("order", ["depth-first", "arrival"])
def test_decisions_in_the_middle_of_a_turn_beside_those_at_its_end(order, roots):
    rule = grow.budgeted(grow.after_disappointment, extra=2, shared=True)
    scheduler = {
        "depth-first": grow.depth_first(roots, rule),
        "arrival": grow.by_arrival(roots, rule, slowness=5),
    }[order]
    mdp = in_turns(random_mdp(1, depth=4, gamma=0.8, early_end=0.3), 2, 2)
    shrinkage = (Shrinkage(between=0.3, inherited=0.2, within=0.6),)
    check(mdp, scheduler, baseline=0.7, shrinkage=shrinkage)


def test_a_boundary_of_a_finished_backbone_chosen_blindly_when_lengths_are_fixed():
    def grow_tree(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)
        for _ in range(2):
            backbone = yield from mdp_lib.finish(mdp, (yield from sample(mdp, top)))
            which = yield np.full(2, 0.5)
            sibling = yield from sample(mdp, backbone[which].next)
            yield from mdp_lib.finish(mdp, sibling)
        return Tree(task_id="blind", root=top)

    check(random_mdp(2), grow_tree)


def test_a_dead_sandbox_that_is_replayed_whatever_action_killed_it():
    def grow_tree(mdp: Mdp) -> mdp_lib.Draws:
        top = start(mdp)

        def descend(decision):
            for _ in range(2 if len(history_of(decision)) == 1 else 1):
                recorded = yield mdp.policy[history_of(decision)]
                # One action is deadly, yet whether it kills decides nothing: it is taken again.
                yield from coin(0.7 if recorded == 0 else 0.0)
                action = attach(mdp, decision, recorded)
                if action.next is not None:
                    yield from descend(action.next)

        yield from descend(top)
        action = yield from sample(mdp, top)
        yield from mdp_lib.finish(mdp, action)
        return Tree(task_id="replayed", root=top)

    check(random_mdp(7, depth=2), grow_tree)


@pytest.mark.parametrize("rule", [grow.nowhere, grow.at_depths({1: 2})])
def test_masks_that_fall_independently_of_actions(rule):
    roots = 3 if rule is grow.nowhere else 2

    def grow_tree(mdp: Mdp) -> mdp_lib.Draws:
        tree = yield from grow.depth_first(roots, rule)(mdp)
        for leaf in tree.leaves():
            if (yield from coin(0.3)):
                leaf.end, leaf.reward = "masked", 0.0
        return tree

    # `expect` conditions on some return being left; one root alone has baseline 0.
    expected = check(random_mdp(8, depth=2), grow_tree)
    assert expected.outcomes > 500


def test_rloo_is_unbiased():
    for seed, roots in [(0, 2), (1, 3)]:
        mdp = random_mdp(seed, early_end=0.2, gamma=0.8)
        estimator = functools.partial(ALGORITHMS["rloo"].estimate, gamma=mdp.gamma)
        expected = mdp_lib.expect(mdp, grow.depth_first(roots, grow.nowhere), estimator)
        assert mdp_lib.error(expected.gradient, mdp.gradient()) < TOLERANCE


@pytest.mark.parametrize("roots", [2, 3])
def test_dr_grpo_is_the_gradient_less_one_part_in_the_group(roots):
    mdp = random_mdp(2, early_end=0.2, gamma=0.8)
    estimator = functools.partial(ALGORITHMS["dr_grpo"].estimate, gamma=mdp.gamma)
    expected = mdp_lib.expect(mdp, grow.depth_first(roots, grow.nowhere), estimator)
    assert mdp_lib.error(expected.gradient, (1 - 1 / roots) * mdp.gradient()) < TOLERANCE
