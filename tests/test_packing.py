"""Packing: every sampled token is trained once, and sees exactly what it was sampled after."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax import packing
from bpo_jax.tree import Action, Decision, Tree
from tests import trees as random_trees

few = settings(max_examples=25, deadline=None)


@st.composite
def packed(draw):
    """(trees, weights, batches) with splits whenever a tree is longer than a row."""
    count = draw(st.integers(1, 4))
    seeds = [draw(st.integers(0, 10_000)) for _ in range(count)]
    trees = [
        random_trees.random_tree(s, masked_rate=draw(st.sampled_from([0.0, 0.4]))) for s in seeds
    ]
    weights = [random_trees.random_weights(t, s) for t, s in zip(trees, seeds, strict=True)]
    longest = max(longest_path(tree) for tree in trees)
    row_length = longest + draw(st.integers(0, 60))
    batches = packing.pack(trees, weights, rows=draw(st.integers(1, 3)), row_length=row_length)
    return trees, weights, batches


def tokens_of(path: list[Action], tree: Tree) -> list[int]:
    """A trajectory, token by token, as the policy reads it."""
    ids = list(tree.root.context_ids)
    for action in path:
        ids += list(action.token_ids)
        if action.next is not None:
            ids += list(action.next.context_ids)
    return ids


def longest_path(tree: Tree) -> int:
    return max(len(tokens_of(path, tree)) for path in tree.paths())


def ancestors(parent_t: np.ndarray, index: int) -> list[int]:
    """The token and what it continues, from the root on."""
    chain = []
    while index >= 0:
        chain.append(index)
        index = parent_t[index]
    return chain[::-1]


def valid(tree: Tree) -> set[int]:
    """Actions with a return below them."""
    order = {id(a): i for i, a in enumerate(tree.actions())}
    return {order[id(a)] for p in tree.paths() if p[-1].end != "masked" for a in p}


def rows_of(batches: list[packing.TreeBatch]):
    for batch in batches:
        for row in range(batch.tokens.shape[0]):
            yield {f.name: getattr(batch, f.name)[row] for f in dataclasses.fields(batch)}


@few
@given(packed())
def test_every_sampled_token_of_a_valid_action_is_trained_exactly_once(case):
    trees, _, batches = case
    seen: dict[tuple[int, int], list[int]] = {}
    for row in rows_of(batches):
        for i in np.flatnonzero(row["loss_mask"]):
            key = (int(row["tree_id"][i]), int(row["action_id"][i]))
            seen.setdefault(key, []).append(int(row["tokens"][i]))
    expected = {
        (t, a): list(tree.actions()[a].token_ids)
        for t, tree in enumerate(trees)
        for a in valid(tree)
    }
    assert seen == expected


@few
@given(packed())
def test_a_query_sees_its_ancestors_and_nothing_else(case):
    for row in rows_of(case[2]):
        index = np.arange(len(row["tokens"]))
        seen_ij = (index[None, :] <= index[:, None]) & (index[:, None] < row["subtree_end"][None])
        for i in index:
            chain = ancestors(row["parent"], i) if row["tree_id"][i] >= 0 else []
            assert list(np.flatnonzero(seen_ij[i])) == chain


@few
@given(packed())
def test_the_tokens_a_trained_token_sees_are_those_it_was_sampled_after(case):
    trees, _, batches = case
    prefixes = {}
    for number, tree in enumerate(trees):
        order = {id(a): i for i, a in enumerate(tree.actions())}
        for path in tree.paths():
            for depth, action in enumerate(path):
                before = tokens_of(path[: depth + 1], tree)
                after = len(action.next.context_ids) if action.next is not None else 0
                prefixes[number, order[id(action)]] = before[: len(before) - after]
    for row in rows_of(batches):
        last = {}
        for i in np.flatnonzero(row["loss_mask"]):
            last[row["tree_id"][i], row["action_id"][i]] = i
        for key, i in last.items():
            chain = ancestors(row["parent"], i)
            assert list(row["tokens"][chain]) == prefixes[key]


@few
@given(packed())
def test_position_is_the_depth_and_a_parent_comes_before_its_child(case):
    for row in rows_of(case[2]):
        for i in np.flatnonzero(row["tree_id"] >= 0):
            parent = row["parent"][i]
            assert parent < i
            assert row["position"][i] == (row["position"][parent] + 1 if parent >= 0 else 0)
            assert parent < 0 or row["tree_id"][parent] == row["tree_id"][i]


@few
@given(packed())
def test_tokens_carry_the_numbers_of_their_action(case):
    trees, weights, batches = case
    for name in ("advantage", "coefficient"):
        back = packing.unpack(trees, batches, [getattr(b, name) for b in batches])
        for tree, weight, arrays in zip(trees, weights, back, strict=True):
            for a in valid(tree):
                np.testing.assert_array_equal(arrays[a], np.float32(getattr(weight, name)[a]))
    back = packing.unpack(trees, batches, [b.behaviour_logprob for b in batches])
    for tree, arrays in zip(trees, back, strict=True):
        for a, action in enumerate(tree.actions()):
            expected = action.logprobs if a in valid(tree) else np.full(len(arrays[a]), np.nan)
            np.testing.assert_array_equal(arrays[a], expected)


@few
@given(packed())
def test_untrained_tokens_count_nothing(case):
    for row in rows_of(case[2]):
        off = row["loss_mask"] == 0
        for name in ("advantage", "coefficient", "behaviour_logprob", "reference_logprob"):
            assert not row[name][off].any()


@few
@given(st.integers(0, 10_000))
def test_flat_trajectories_sum_to_the_tree(seed):
    tree = random_trees.random_tree(seed, masked_rate=0.3)
    weight = random_trees.random_weights(tree, seed)
    chains, weights = packing.flatten(tree, weight)
    assert all(len(c.leaves()) == 1 for c in chains)

    # A number that depends on the token and on all that comes before it.
    def score(trees, weights):
        total = 0.0
        length = max([longest_path(t) for t in trees], default=1) + 200
        for row in rows_of(packing.pack(trees, weights, rows=1, row_length=length)):
            for i in np.flatnonzero(row["loss_mask"]):
                seen = row["tokens"][ancestors(row["parent"], i)]
                value = np.dot(seen, np.sqrt(1.0 + np.arange(len(seen))))
                total += float(row["coefficient"][i]) * float(row["advantage"][i]) * value
        return total

    assert score(chains, weights) == pytest.approx(score([tree], [weight]), rel=1e-6, abs=1e-4)
    unique, flat = packing.token_counts(tree)
    assert flat == sum(packing.token_counts(c)[0] for c in chains)
    assert unique <= flat


def test_layout_of_a_fork_by_hand():
    end = {"end": "done"}

    def action(*ids, **kwargs):
        return Action(token_ids=np.array(ids), logprobs=np.zeros(len(ids)), **kwargs)

    short, long = action(5, **end), action(6, 7, **end)
    fork = Decision(context_ids=np.array([4]), actions=[short, long])
    tree = Tree(
        task_id="fork", root=Decision(context_ids=np.array([1, 2]), actions=[action(3, next=fork)])
    )
    weights = packing.Weights(advantage=np.array([1, 2, 3]), coefficient=np.array([1, 0.5, 0.5]))
    (batch,) = packing.pack([tree], [weights], rows=1, row_length=9, scale=0.1)
    row = next(rows_of([batch]))
    #                                    prompt  root ctx  long   short pad
    assert row["tokens"].tolist() == [1, 2, 3, 4, 6, 7, 5, 0, 0]
    assert row["position"].tolist() == [0, 1, 2, 3, 4, 5, 4, 0, 0]
    assert row["parent"].tolist() == [-1, 0, 1, 2, 3, 4, 3, -1, -1]
    assert row["subtree_end"].tolist() == [7, 7, 7, 7, 6, 6, 7, 7, 8]
    assert row["action_id"].tolist() == [-1, -1, 0, -1, 2, 2, 1, -1, -1]
    assert row["advantage"].tolist() == [0, 0, 1, 0, 3, 3, 2, 0, 0]
    np.testing.assert_allclose(row["coefficient"], [0, 0, 0.1, 0, 0.05, 0.05, 0.05, 0, 0])
    assert packing.token_counts(tree) == (7, 11)


def test_trees_go_first_fit_longest_first():
    assert packing._first_fit_decreasing([3, 9, 5, 2, 6], 10) == [[1], [4, 0], [2, 3]]


def test_every_micro_batch_has_the_same_shape():
    trees = [random_trees.random_tree(s) for s in range(6)]
    weights = [random_trees.random_weights(t, 0) for t in trees]
    batches = packing.pack(trees, weights, rows=2, row_length=128)
    shapes = {getattr(b, f.name).shape for b in batches for f in dataclasses.fields(b)}
    assert shapes == {(2, 128)}


def test_reference_log_probs_are_copied_to_their_tokens():
    tree = random_trees.random_tree(3)
    weights = random_trees.random_weights(tree, 0)
    reference = [a.logprobs - 1.0 for a in tree.actions()]
    batches = packing.pack([tree], [weights], rows=1, row_length=300, reference=[reference])
    (back,) = packing.unpack([tree], batches, [b.reference_logprob for b in batches])
    for got, expected in zip(back, reference, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_nothing_to_train_gives_no_batch():
    tree = random_trees.random_tree(0, masked_rate=1.0)
    weights = random_trees.random_weights(tree, 0)
    assert packing.pack([tree], [weights], rows=1, row_length=8) == []
    assert packing.token_counts(tree) == (0, 0)


def test_a_trajectory_longer_than_a_row_is_refused():
    tree = random_trees.random_tree(1)
    weights = random_trees.random_weights(tree, 0)
    with pytest.raises(ValueError, match=r"trajectory of \d+ tokens.*raise batch.row_length"):
        packing.pack([tree], [weights], rows=1, row_length=longest_path(tree) - 1)


def test_a_tree_without_prompt_is_refused():
    tree = random_trees.random_tree(1)
    tree.root.context_ids = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="there must be a prompt"):
        packing.pack([tree], [random_trees.random_weights(tree, 0)], rows=1, row_length=500)


@pytest.mark.parametrize(
    ("advantage", "message"), [(np.zeros(1), "has shape"), (None, "is not finite")]
)
def test_an_estimate_that_does_not_fit_is_refused(advantage, message):
    tree = random_trees.random_tree(1)
    count = len(tree.actions())
    bad = np.full(count, np.nan) if advantage is None else advantage
    weights = packing.Weights(advantage=bad, coefficient=np.ones(count))
    with pytest.raises(ValueError, match=message):
        packing.pack([tree], [weights], rows=1, row_length=500)
