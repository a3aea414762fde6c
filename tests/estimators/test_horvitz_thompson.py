"""A second way to the gradient: forks chosen after the fact, each divided by its probability.

A finished backbone says where to fork. Each of its decisions is chosen by a coin of its own, whose
probability p_t may depend on the whole backbone, and gets fresh siblings (Horvitz-Thompson):

    g = mean over roots of  sum_t  beta_t + [t chosen] / p_t (fresh_t - beta_t)

beta_t is the backbone's own term, blind to the fresh returns; fresh_t scores only the action at t
of the fresh siblings. The start is not forked: there the roots are the fresh ones. Both terms are
made of `bpo`'s advantages, which are so checked on forks that `bpo` itself must not use.
"""

import functools
import itertools
import math

import numpy as np
import pytest

from bpo_jax.estimators import ALGORITHMS, Estimate, solve
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact.mdp import (
    Mdp,
    coin,
    direction_error,
    error,
    finish,
    random_mdp,
    sample,
)
from bpo_jax.tree import Action, Decision, Tree

TOLERANCE, MARGIN = 1e-10, 0.02


def post_hoc(roots: int, *, fresh: int) -> mdp_lib.Scheduler:
    """Forks finished backbones, most likely those that earned little, at likely actions."""

    def grow(mdp: Mdp) -> mdp_lib.Draws:
        top = mdp_lib.start(mdp)
        for _ in range(roots):
            backbone = yield from finish(mdp, (yield from sample(mdp, top)))
            low = 1.0 / (1.0 + math.exp(2.0 * sum(a.reward for a in backbone)))
            for action in backbone:
                action.info |= {"backbone": True, "chosen": False}
            for before, action in itertools.pairwise(backbone):
                likely = mdp.policy[before.next.snapshot][action.info["choice"]]
                action.info["probability"] = 0.1 + 0.5 * low + 0.4 * likely
                action.info["chosen"] = yield from coin(action.info["probability"])
            for before, action in itertools.pairwise(backbone):
                for _ in range(fresh if action.info["chosen"] else 0):
                    yield from finish(mdp, (yield from sample(mdp, before.next)))
        return Tree(task_id="post-hoc", root=top)

    return grow


def horvitz_thompson(tree: Tree, *, gamma: float, baseline: float) -> Estimate:
    bpo = functools.partial(ALGORITHMS["bpo"].estimate, gamma=gamma, baseline=baseline)
    actions, solved = tree.actions(), solve(tree, gamma)
    parent = solved.parent.tolist()
    backbone = np.asarray([a.info.get("backbone", False) for a in actions])
    share = np.zeros(len(actions))
    for i, action in enumerate(actions):
        if backbone[i]:
            share[i] = 1.0 - (1.0 / action.info["probability"] if action.info["chosen"] else 0.0)
        elif backbone[parent[i]]:
            first, *fresh = actions[parent[i]].next.actions
            share[i] = 1.0 / first.info["probability"] / len(fresh)
    advantage = bpo(tree).advantage
    advantage[backbone] = bpo(unforked(tree)).advantage
    coefficient = share * solved.discount / len(tree.root.actions)
    return Estimate(advantage=advantage, coefficient=coefficient)


def unforked(tree: Tree) -> Tree:
    """The backbones alone."""

    def copy(action: Action) -> Action:
        below = None if action.next is None else Decision(actions=[copy(action.next.actions[0])])
        return Action(reward=action.reward, end=action.end, next=below)

    return Tree(task_id=tree.task_id, root=Decision(actions=[copy(a) for a in tree.root.actions]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "roots, fresh, size",
    [(1, 1, {"depth": 3}), (1, 2, {"depth": 3}), (2, 1, {"depth": 2, "actions": 3})],
)
def test_forks_chosen_post_hoc_give_the_gradient_when_divided_by_their_probability(
    roots, fresh, size, seed
):
    mdp = random_mdp(seed, early_end=0.2, gamma=0.8, **size)
    scheduler = post_hoc(roots, fresh=fresh)
    estimator = functools.partial(horvitz_thompson, gamma=mdp.gamma, baseline=0.7)
    expected = mdp_lib.expect(mdp, scheduler, estimator).gradient
    assert error(expected, mdp.gradient()) < TOLERANCE

    # On the same trees the plain estimate is biased: the choice has seen what came after.
    plain = functools.partial(ALGORITHMS["bpo"].estimate, gamma=mdp.gamma, baseline=0.7)
    biased = mdp_lib.expect(mdp, scheduler, plain).gradient
    assert direction_error(biased, mdp.gradient()) > MARGIN
