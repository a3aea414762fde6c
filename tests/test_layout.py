"""The layout of a tree: beginnings of contexts are there once, and long trees are cut cheaply."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bpo_jax import layout, packing
from bpo_jax.tree import Action, Decision, Tree
from tests import trees as random_trees

few = settings(max_examples=40, deadline=None)


def act(*ids, **kwargs) -> Action:
    return Action(token_ids=np.array(ids), logprobs=np.zeros(len(ids)), **kwargs)


def fresh(ids, *actions) -> Decision:
    return Decision(context_ids=np.array(ids), fresh=True, actions=list(actions))


def summary(pieces: list[layout.Piece]) -> list[tuple]:
    return [(p.ids.tolist(), p.sampled, p.action_id, p.parent) for p in pieces]


def test_a_window_by_hand():
    # The prompt is 1 2; each turn shows it and the turn before.
    end = {"end": "done"}
    last = fresh([1, 2, 6, 7], act(9, **end), act(8, 8, **end))
    second = fresh([1, 2, 4, 5], act(6, next=last))
    tree = Tree(
        task_id="w", root=Decision(context_ids=np.array([1, 2]), actions=[act(4, next=second)])
    )
    assert summary(layout.lay_out(tree)) == [
        ([1, 2], 0, -1, -1),
        ([6, 7], 0, -1, 0),  # with the longest path below it
        ([8, 8], 2, 3, 1),
        ([9], 1, 2, 1),
        ([4, 5], 0, -1, 0),  # the same 4 that action 0 sampled, but here it is read
        ([6], 1, 1, 4),
        ([4], 1, 0, 0),
    ]
    weights = packing.Weights(advantage=np.arange(4), coefficient=np.ones(4))
    (batch,) = packing.pack([tree], [weights], rows=1, row_length=12)
    #                                    1  2  6  7  8  8  9  4  5  6  4  pad
    assert batch.parent[0].tolist() == [-1, 0, 1, 2, 3, 4, 3, 1, 7, 8, 1, -1]
    assert batch.position[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 3, 4, 2, 0]
    assert batch.subtree_end[0].tolist() == [11, 11, 7, 7, 6, 6, 7, 10, 10, 10, 11, 11]
    assert batch.action_id[0].tolist() == [-1, -1, -1, -1, 3, 3, 2, -1, -1, 1, 0, -1]
    # Read as four contexts and their actions, siblings with a context each.
    assert packing.token_counts(tree) == (11, 2 * (3 + 5) + (4 + 1) + (4 + 2))


def test_a_context_that_nothing_precedes_stands_alone():
    other = fresh([7, 8], act(3, end="done"))
    tree = Tree(
        task_id="t", root=Decision(context_ids=np.array([1, 2]), actions=[act(5, next=other)])
    )
    assert [p.parent for p in layout.lay_out(tree)] == [-1, 0, -1, 2]


def test_equal_contexts_are_one():
    one, two = (fresh([1, 2, 3], act(i, end="done")) for i in (5, 6))
    root = Decision(context_ids=np.array([1, 2]), actions=[act(4, next=one), act(4, next=two)])
    pieces = layout.lay_out(Tree(task_id="t", root=root))
    assert sorted(p.ids.tolist() for p in pieces) == [[1, 2], [3], [4], [4], [5], [6]]


def test_what_is_appended_to_a_fresh_context_hangs_below_its_action():
    after = Decision(context_ids=np.array([6]), actions=[act(7, end="done")])
    middle = fresh([1, 3], act(5, next=after))
    root = Decision(context_ids=np.array([1, 2]), actions=[act(4, next=middle)])
    assert summary(layout.lay_out(Tree(task_id="t", root=root))) == [
        ([1], 0, -1, -1),
        ([3], 0, -1, 0),
        ([5, 6], 1, 1, 1),
        ([7], 1, 2, 2),
        ([2], 0, -1, 0),
        ([4], 1, 0, 4),
    ]


@few
@given(st.integers(0, 10_000), st.sampled_from([0.3, 1.0]), st.sampled_from([2, 64]))
def test_every_beginning_of_a_context_is_laid_out_once(seed, fresh_rate, vocab):
    tree = random_trees.random_tree(seed, fresh_rate=fresh_rate, vocab=vocab, masked_rate=0.2)
    returns = layout.count_returns(tree)
    beginnings, others = set(), 0
    for decision in tree.decisions():
        kept = [a for a in decision.actions if returns[id(a)]]
        ids = tuple(decision.context_ids.tolist())
        if kept and (decision is tree.root or decision.fresh):
            beginnings |= {ids[: n + 1] for n in range(len(ids))}
        elif kept:
            others += len(ids)
        others += sum(len(a.token_ids) for a in kept)
    pieces = layout.lay_out(tree)
    assert sum(len(p.ids) for p in pieces) == len(beginnings) + others
    assert packing.token_counts(tree)[0] == len(beginnings) + others


@few
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_longest_path_below_a_piece_comes_first(seed, fresh_rate):
    pieces = layout.lay_out(random_trees.random_tree(seed, fresh_rate=fresh_rate))
    reach = [len(p.ids) for p in pieces]
    for index in reversed(range(len(pieces))):
        below = [i for i, p in enumerate(pieces) if p.parent == index]
        reach[index] += max((reach[i] for i in below), default=0)
    for parent in range(-1, len(pieces)):
        below = [reach[i] for i, p in enumerate(pieces) if p.parent == parent]
        assert below == sorted(below, reverse=True)


def cheapest(leaves: list[list[int]], length: list[int], capacity: int) -> tuple[int, int]:
    """(parts, tokens) of the best cut, over all there are; a leaf is its path of pieces."""
    found = []
    for cuts in itertools.product([False, True], repeat=len(leaves) - 1):
        runs: list[set[int]] = [set(leaves[0])]
        for cut, path in zip(cuts, leaves[1:], strict=True):
            if cut:
                runs.append(set())
            runs[-1] |= set(path)
        sizes = [sum(length[i] for i in run) for run in runs]
        if max(sizes) <= capacity:
            found.append((len(runs), sum(sizes)))
    return min(found)


@few
@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([0.0, 0.5]))
def test_a_tree_is_cut_into_the_fewest_parts_with_the_least_repeated(seed, share, fresh_rate):
    tree = random_trees.random_tree(seed, fork_rate=0.4, fresh_rate=fresh_rate)
    pieces = layout.lay_out(tree)
    length = [len(p.ids) for p in pieces]
    leaves = []
    for index in sorted(set(range(len(pieces))) - {p.parent for p in pieces}):
        path = [index]
        while pieces[path[-1]].parent >= 0:
            path.append(pieces[path[-1]].parent)
        leaves.append(path)
    assume(2 <= len(leaves) <= 12)
    longest = max(sum(length[i] for i in path) for path in leaves)
    capacity = longest + int(share * (sum(length) - longest))
    parts = layout.split(tree, pieces, capacity)
    assert all(part.length == sum(len(p.ids) for p in part.pieces) for part in parts)
    assert (len(parts), sum(p.length for p in parts)) == cheapest(leaves, length, capacity)


def test_a_cut_by_hand():
    # Two roots below a prompt of 2, each of 5 and then 3 + 3: cut between the roots, though the
    # first part would have room for more.
    def root(token):
        fork = Decision(actions=[act(*[token + i] * 3, end="done") for i in (1, 2)])
        return act(*[token] * 5, next=fork)

    tree = Tree(task_id="t", root=Decision(context_ids=np.zeros(2), actions=[root(10), root(20)]))
    parts = layout.split(tree, layout.lay_out(tree), row_length=21)
    assert [[p.ids.tolist() for p in part.pieces] for part in parts] == [
        [[0] * 2, [10] * 5, [11] * 3, [12] * 3],
        [[0] * 2, [20] * 5, [21] * 3, [22] * 3],
    ]
    assert [part.trained for part in parts] == [[True] * 4, [False, True, True, True]]
    assert [p.parent for p in parts[1].pieces] == [-1, 0, 1, 1]


def test_fewer_parts_count_more_than_fewer_tokens():
    # Four leaves of 10 new tokens each. To cut in the middle repeats 5; to cut off the first and
    # the last repeats 2, but makes three parts.
    laid, shared = np.array([10, 20, 30, 40]), np.array([0, 1, 5, 1])
    assert layout._cut(laid, shared, capacity=25) == [(0, 1), (2, 3)]
    assert layout._cut(laid, shared, capacity=24) == [(0, 0), (1, 2), (3, 3)]


def test_a_path_longer_than_a_row_names_tree_and_lengths():
    tree = random_trees.random_tree(1)
    with pytest.raises(ValueError, match=r"'random-1' has a trajectory of \d+ tokens, .* holds 9:"):
        layout.split(tree, layout.lay_out(tree), 9)
