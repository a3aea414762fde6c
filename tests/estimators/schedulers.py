"""Ways to grow a tree that keep the estimate unbiased.

A *rule* says how many children a decision gets. It is asked once a decision, before the first child
is drawn, and sees the state, the root it lies under and the returns finished so far, in order.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Generator

import numpy as np

from bpo_jax.tree import Action, Decision, Tree
from tests.estimators.mdp import Draws, History, Mdp, Scheduler, history_of, sample, start

Rule = Callable[[History, int, list[float]], int]
RuleFactory = Callable[[Mdp], Rule]
"""Makes a fresh rule for every tree: rules may count what they have spent."""


def nowhere(mdp: Mdp) -> Rule:
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
        rule, top, finished = factory(mdp), start(), list[float]()

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
        rule, top, finished = factory(mdp), start(), list[float]()
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


def frontier_top(roots: int, forks: int) -> Scheduler:
    """Level by level; on the first, the most uncertain of all decisions fork, then all draw."""

    def grow(mdp: Mdp) -> Draws:
        top = start()
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
