"""Ways to grow a tree: predictable ones, which keep the estimate unbiased, and post-hoc ones.

A *rule* says how many children a decision gets. It is asked once a decision, before the first child
is drawn, and sees the state, the root it lies under and the returns finished so far, in order.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Generator

import numpy as np

from bpo_jax.estimators.exact.mdp import (
    Draws,
    History,
    Mdp,
    Scheduler,
    coin,
    finish,
    history_of,
    sample,
    start,
)
from bpo_jax.tree import Action, Decision, Tree

Rule = Callable[[History, int, list[float]], int]
RuleFactory = Callable[[Mdp], Rule]
"""Makes a fresh rule for every tree: rules may count what they have spent."""


def nowhere(mdp: Mdp) -> Rule:
    """Never forks."""
    return lambda history, root, finished: 1


def at_depths(children: dict[int, int]) -> RuleFactory:
    """Depth -> number of children, 1 elsewhere."""
    return lambda mdp: lambda history, root, finished: children.get(len(history), 1)


def uncertain(mdp: Mdp) -> Rule:
    """Forks where the policy's entropy is above the median over all states."""
    threshold = float(np.median([mdp.entropy(h) for h in mdp.policy]))
    return lambda history, root, finished: 2 if mdp.entropy(history) > threshold else 1


def midway(mdp: Mdp) -> Rule:
    """Forks every turn that has a marker, and nothing else."""
    return lambda history, root, finished: 2 if history in mdp.within else 1


def after_disappointment(mdp: Mdp) -> Rule:
    """Forks where the last finished return fell short of J; at first, where it is uncertain."""
    first, expected = uncertain(mdp), mdp.value()

    def rule(history: History, root: int, finished: list[float]) -> int:
        if not finished:
            return first(history, root, finished)
        return 2 if finished[-1] < expected else 1

    return rule


def budgeted(factory: RuleFactory, *, extra: int, shared: bool) -> RuleFactory:
    """At most so many extra children per root, or for all roots; charged when they are decided."""

    def make(mdp: Mdp) -> Rule:
        rule = factory(mdp)
        spent: collections.Counter[int] = collections.Counter()

        def limited(history: History, root: int, finished: list[float]) -> int:
            children = rule(history, root, finished)
            account = 0 if shared else root
            if spent[account] + children - 1 > extra:
                return 1
            spent[account] += children - 1
            return children

        return limited

    return make


def depth_first(roots: int, factory: RuleFactory) -> Scheduler:
    """Every branch is followed to its end before the next one begins."""

    def grow(mdp: Mdp) -> Draws:
        rule, top, finished = factory(mdp), start(mdp), list[float]()

        def descend(action: Action, root: int, earned: float) -> Generator[np.ndarray, int, None]:
            if action.next is None:
                finished.append(earned)
                return
            discount = mdp.discount(history_of(action.next))
            for _ in range(rule(history_of(action.next), root, finished)):
                child = yield from sample(mdp, action.next)
                yield from descend(child, root, earned + discount * child.reward)

        for root in range(roots):
            first = yield from sample(mdp, top)
            yield from descend(first, root, first.reward)
        return Tree(task_id="mdp", root=top)

    return grow


def by_arrival(roots: int, factory: RuleFactory, *, slowness: int) -> Scheduler:
    """All branches run at once, and are served in the order in which their actions come back.

    How long an action takes depends on its number, modulo the slowness. A slowness of 1 makes all
    equally slow: breadth first.
    """

    def grow(mdp: Mdp) -> Draws:
        rule, top, finished = factory(mdp), start(mdp), list[float]()
        queue: list[tuple[int, int, int, float, Action]] = []
        ticket = iter(range(10**6))

        def send(
            decision: Decision, root: int, time: int, earned: float
        ) -> Generator[np.ndarray, int, None]:
            action = yield from sample(mdp, decision)
            earned += mdp.discount(history_of(decision)) * action.reward
            back = time + 1 + (7 * action.info["edges"][-1]) % slowness
            heapq.heappush(queue, (back, next(ticket), root, earned, action))

        for root in range(roots):
            yield from send(top, root, 0, 0.0)
        while queue:
            time, _, root, earned, action = heapq.heappop(queue)
            if action.next is None:
                finished.append(earned)
                continue
            for _ in range(rule(history_of(action.next), root, finished)):
                yield from send(action.next, root, time, earned)
        return Tree(task_id="mdp", root=top)

    return grow


def along_backbone(roots: int, factory: RuleFactory) -> Scheduler:
    """Only first children may fork; the fresh ones are followed to their end and no further.

    A rule is told the root it is asked for, and of the returns nothing.
    """

    def grow(mdp: Mdp) -> Draws:
        rule, top = factory(mdp), start(mdp)

        def descend(action: Action, root: int) -> Generator[np.ndarray, int, None]:
            if action.next is None:
                return
            children = rule(history_of(action.next), root, [])
            yield from descend((yield from sample(mdp, action.next)), root)
            for _ in range(children - 1):
                yield from finish(mdp, (yield from sample(mdp, action.next)))

        for root in range(roots):
            yield from descend((yield from sample(mdp, top)), root)
        return Tree(task_id="mdp", root=top)

    return grow


def everywhere(children: int) -> RuleFactory:
    """The same number of children at every decision."""
    return lambda mdp: lambda history, root, finished: children


def post_hoc_top(roots: int, *, forks: int, fresh: int) -> Scheduler:
    """Forks finished backbones where they were most uncertain. This looks at what came after.

    What came after says which decisions there were to choose from.
    """

    def grow(mdp: Mdp) -> Draws:
        top = start(mdp)
        for _ in range(roots):
            backbone = yield from finish(mdp, (yield from sample(mdp, top)))
            passed = [a.next for a in backbone if a.next is not None]
            passed.sort(key=lambda d: -mdp.entropy(history_of(d)))
            for decision in passed[:forks]:
                for _ in range(fresh):
                    yield from finish(mdp, (yield from sample(mdp, decision)))
        return Tree(task_id="post-hoc", root=top)

    return grow


def post_hoc_coins(roots: int, *, fresh: int) -> Scheduler:
    """Forks finished backbones by coins whose probability depends on the whole backbone.

    Likely where the backbone earned little and its action was a likely one. The probability stands
    in ``inclusion``.
    """

    def grow(mdp: Mdp) -> Draws:
        top = start(mdp)
        for _ in range(roots):
            backbone = yield from finish(mdp, (yield from sample(mdp, top)))
            low = 1.0 / (1.0 + np.exp(2.0 * sum(a.reward for a in backbone)))
            chosen = []
            for before, action in itertools.pairwise(backbone):
                assert before.next is not None
                likely = mdp.policy[history_of(before.next)][action.info["choice"]]
                before.next.inclusion = float(0.1 + 0.5 * low + 0.4 * likely)
                if (yield from coin(before.next.inclusion)):
                    chosen.append(before.next)
            for decision in chosen:
                for _ in range(fresh):
                    yield from finish(mdp, (yield from sample(mdp, decision)))
        return Tree(task_id="post-hoc", root=top)

    return grow


def frontier_top(roots: int, forks: int) -> Scheduler:
    """Level by level; on the first, the most uncertain of all decisions fork, then all draw."""

    def grow(mdp: Mdp) -> Draws:
        top = start(mdp)
        frontier = []
        for _ in range(roots):
            frontier.append((yield from sample(mdp, top)).next)
        while frontier := [d for d in frontier if d is not None]:
            ranked = sorted(frontier, key=lambda d: -mdp.entropy(history_of(d)))
            chosen = {id(d) for d in ranked[:forks]} if len(history_of(frontier[0])) == 1 else set()
            below = []
            for decision in frontier:
                for _ in range(2 if id(decision) in chosen else 1):
                    below.append((yield from sample(mdp, decision)).next)
            frontier = below
        return Tree(task_id="mdp", root=top)

    return grow
