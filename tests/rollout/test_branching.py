"""The number of children is decided, and paid for, from what is known before they are sampled."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.rollout.branching import Branching, BranchingConfig, Budget, Path
from bpo_jax.tree import Action, Decision, Tree


def rule(**options) -> Branching:
    return Branching(BranchingConfig(**options))


def path(**options) -> Path:
    return Path(**({"root": 0, "turn": 3, "since_fork": 3, "backbone": True, "seed": 1} | options))


def test_a_decision_forks_where_its_entropy_reaches_the_threshold():
    r = rule(initial_threshold=0.5, siblings=4)
    assert [r.decide(path(), h, Budget()) for h in (0.2, 0.5, 0.7)] == [1, 4, 4]


def test_a_fork_is_charged_to_its_tree_and_root_when_it_is_decided():
    budget = Budget()
    r = rule(initial_threshold=0.5, forks_per_root=2, forks_per_tree=3)
    assert r.decide(path(root=1), 0.1, budget) == 1
    assert (budget.tree, budget.roots) == (0, {})
    assert [r.decide(path(root=1), 1.0, budget) for _ in range(3)] == [3, 3, 1]
    assert [r.decide(path(root=0), 1.0, budget) for _ in range(3)] == [3, 1, 1]
    assert (budget.tree, budget.roots) == (3, {1: 2, 0: 1})


def test_the_root_decision_is_never_forked_beyond_its_roots():
    assert rule(initial_threshold=0.0).decide(path(turn=0), 9.0, Budget()) == 1


def test_forks_on_a_path_keep_their_distance():
    r = rule(initial_threshold=0.0, min_gap=3)
    assert [r.decide(path(since_fork=n), 1.0, Budget()) for n in (1, 2, 3, 4)] == [1, 1, 3, 3]


def test_siblings_fork_again_only_where_nesting_is_allowed():
    for nested, expected in ((False, 1), (True, 3)):
        r = rule(initial_threshold=0.0, nested=nested)
        assert r.decide(path(backbone=False), 1.0, Budget()) == expected


def test_no_placement_never_forks():
    assert rule(placement="none").decide(path(), 9.0, Budget()) == 1


def test_random_placement_forks_at_its_rate_and_blind_to_entropy_and_order():
    r = rule(placement="random", quantile=0.7, seed=5)
    places = [path(seed=s, turn=t) for s in range(400) for t in (1, 2, 3)]
    first = [r.decide(p, 0.0, Budget()) for p in places]
    again = [r.decide(p, 9.0, Budget()) for p in reversed(places)][::-1]
    assert first == again
    # Four standard deviations of a share of 0.3 in 1200.
    assert np.mean(np.array(first) == 3) == pytest.approx(0.3, abs=0.053)
    other = rule(placement="random", quantile=0.7, seed=6)
    assert [other.decide(p, 0.0, Budget()) for p in places] != first


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.floats(0, 3)), max_size=40),
    st.integers(0, 3),
    st.integers(0, 4),
)
def test_budgets_are_never_exceeded(visits, per_root, per_tree):
    budget = Budget()
    r = rule(initial_threshold=1.0, forks_per_root=per_root, forks_per_tree=per_tree)
    forks = [
        root for root, turn, h in visits if r.decide(path(root=root, turn=turn), h, budget) > 1
    ]
    assert len(forks) == budget.tree <= per_tree
    assert all(forks.count(root) <= per_root for root in range(3))


def _tree(entropies) -> Tree:
    """A chain whose root decision has an entropy of its own."""
    root = decision = Decision(entropy=99.0)
    for entropy in entropies:
        below = Decision(entropy=entropy)
        decision.actions.append(Action(next=below))
        decision = below
    decision.actions.append(Action(end="done"))
    return Tree(task_id="t", root=root)


def test_the_threshold_moves_between_updates_towards_the_quantile():
    r = rule(initial_threshold=0.5, quantile=0.75, memory=0.8)
    assert r.threshold == 0.5
    r.update([_tree([0.0, 1.0]), _tree([2.0, 3.0, 4.0])])
    assert r.threshold == pytest.approx(3.0)
    r.update([_tree([1.0])])
    assert r.threshold == pytest.approx(0.8 * 3.0 + 0.2 * 1.0)
    r.update([])
    assert r.threshold == pytest.approx(2.6)


def test_the_state_survives_json():
    a, b = rule(), rule()
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert b.threshold == a.config.initial_threshold
    a.update([_tree([0.3, 1 / 3])])
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert b.threshold == a.threshold


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "post_hoc"}, "placement='post_hoc'"),
        ({"siblings": 1}, "siblings=1"),
        ({"forks_per_root": -1}, "budgets"),
        ({"min_gap": 0}, "min_gap=0"),
        ({"quantile": 1.0}, "quantile=1.0"),
        ({"memory": 1.0}, "memory=1.0"),
    ],
)
def test_a_value_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BranchingConfig(**options)
