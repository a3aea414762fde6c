"""Trees list their decisions, actions, leaves and paths in one order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.tree import Action, Decision, Tree
from tests.trees import random_tree

few = settings(max_examples=30, deadline=None)
any_tree = st.builds(
    random_tree, st.integers(0, 10_000), roots=st.integers(1, 3), masked_rate=st.just(0.2)
)


def fork_by_hand() -> Tree:
    """Root action a; then a fork of b, which goes on to d, and c."""
    d = Action(text="d", end="done")
    b = Action(text="b", next=Decision(actions=[d]))
    c = Action(text="c", end="masked")
    a = Action(text="a", next=Decision(actions=[b, c]))
    return Tree(task_id="fork", root=Decision(actions=[a]))


def names(actions) -> str:
    return "".join(a.text for a in actions)


def test_orders_by_hand():
    tree = fork_by_hand()
    assert names(tree.actions()) == "abdc"
    assert names(tree.leaves()) == "dc"
    assert [names(path) for path in tree.paths()] == ["abd", "ac"]
    assert [names(d.actions) for d in tree.decisions()] == ["a", "bc", "d"]
    assert [names(d.actions) for d in tree.forks()] == ["bc"]


def test_several_roots_are_not_a_fork():
    roots = [Action(end="done") for _ in range(3)]
    tree = Tree(task_id="flat", root=Decision(actions=roots))
    assert tree.forks() == []
    assert tree.leaves() == roots


def test_an_open_branch_is_no_leaf():
    tree = Tree(task_id="open", root=Decision(actions=[Action(next=Decision())]))
    assert tree.leaves() == []
    assert list(tree.paths()) == []
    assert tree.decisions() == [tree.root]


@few
@given(any_tree)
def test_an_action_comes_before_all_below_it(tree):
    order = {id(a): i for i, a in enumerate(tree.actions())}
    for path in tree.paths():
        assert list(np.sort([order[id(a)] for a in path])) == [order[id(a)] for a in path]


@few
@given(any_tree)
def test_paths_end_at_the_leaves_and_cover_every_action(tree):
    paths = list(tree.paths())
    assert [path[-1] for path in paths] == tree.leaves()
    assert {id(a) for path in paths for a in path} == {id(a) for a in tree.actions()}


@few
@given(any_tree)
def test_every_action_is_taken_at_one_decision(tree):
    taken = [id(a) for d in tree.decisions() for a in d.actions]
    assert sorted(taken) == sorted(id(a) for a in tree.actions())
