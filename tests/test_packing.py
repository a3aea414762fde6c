"""Packing: every sampled token is trained once, and sees exactly what it was sampled after.

The properties hold for trees whose contexts are appended, for those whose decisions have contexts
of their own, and for trees with both.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bpo_jax import layout, packing
from bpo_jax.tree import Action, Decision, Tree
from tests import trees as random_trees

few = settings(max_examples=25, deadline=None)


@st.composite
def packed(draw):
    """(trees, weights, batches) with splits whenever a tree is longer than a row."""
    count = draw(st.integers(1, 4))
    seeds = [draw(st.integers(0, 10_000)) for _ in range(count)]
    trees = [
        random_trees.random_tree(
            s,
            masked_rate=draw(st.sampled_from([0.0, 0.4])),
            fresh_rate=draw(st.sampled_from([0.0, 0.5, 1.0])),
            # With few ids, what was sampled is also what some context goes on with.
            vocab=draw(st.sampled_from([2, 64])),
        )
        for s in seeds
    ]
    weights = [random_trees.random_weights(t, s) for t, s in zip(trees, seeds, strict=True)]
    longest = max(longest_path(tree) for tree in trees)
    row_length = longest + draw(st.integers(0, 60))
    batches = packing.pack(
        trees,
        weights,
        rows=draw(st.integers(1, 3)),
        row_length=row_length,
        buckets=draw(st.sampled_from([(), (row_length // 2, row_length - 3)])),
    )
    return trees, weights, batches


def sequences(tree: Tree) -> list[list[int]]:
    """What the policy read before each of ``tree.actions()``, token by token, and the action."""
    found = {}

    def visit(decision: Decision, before: list[int]) -> None:
        before = ([] if decision.fresh else before) + list(decision.context_ids)
        for action in decision.actions:
            found[id(action)] = before + list(action.token_ids)
            if action.next is not None:
                visit(action.next, found[id(action)])

    visit(tree.root, [])
    return [found[id(action)] for action in tree.actions()]


def longest_path(tree: Tree) -> int:
    return max(map(len, sequences(tree)))


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


def arrays_of(batch: packing.TreeBatch) -> dict[str, np.ndarray]:
    """Those that are there; some parts of a loss have arrays of their own."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: array for name, array in fields.items() if array is not None}


def rows_of(batches: list[packing.TreeBatch]):
    for batch in batches:
        for row in range(batch.tokens.shape[0]):
            yield {name: array[row] for name, array in arrays_of(batch).items()}


def loss(batches: list[packing.TreeBatch]) -> float:
    """A weighted sum over trained tokens of a number that depends on each and all before it."""
    total = 0.0
    for row in rows_of(batches):
        for i in np.flatnonzero(row["loss_mask"]):
            seen = row["tokens"][ancestors(row["parent"], i)]
            value = np.dot(seen, np.sqrt(1.0 + np.arange(len(seen))))
            total += float(row["coefficient"][i]) * float(row["advantage"][i]) * value
    return total


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
    intended = [sequences(tree) for tree in trees]
    for row in rows_of(batches):
        last = {}
        for i in np.flatnonzero(row["loss_mask"]):
            last[row["tree_id"][i], row["action_id"][i]] = i
        for (tree_id, action_id), i in last.items():
            chain = ancestors(row["parent"], i)
            assert list(row["tokens"][chain]) == intended[tree_id][action_id]


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
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]))
def test_flat_trajectories_sum_to_the_tree(seed, fresh_rate):
    tree = random_trees.random_tree(seed, masked_rate=0.3, fresh_rate=fresh_rate)
    weight = random_trees.random_weights(tree, seed)
    chains, weights = packing.flatten(tree, weight)
    assert all(len(c.leaves()) == 1 for c in chains)
    whole, flat = (
        loss(packing.pack(trees, numbers, rows=1, row_length=1000))
        for trees, numbers in (([tree], [weight]), (chains, weights))
    )
    assert flat == pytest.approx(whole, rel=1e-6, abs=1e-4)
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


@few
@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_tree_split_anywhere_between_its_longest_path_and_its_size_counts_the_same(
    seed, share, fresh_rate
):
    tree = random_trees.random_tree(
        seed, turns=5, fork_rate=0.5, masked_rate=0.2, fresh_rate=fresh_rate
    )
    weight = random_trees.random_weights(tree, seed)
    unique, _ = packing.token_counts(tree)
    assume(unique)
    longest = longest_path(tree)
    row_length = longest + int(share * max(unique - longest, 0))
    split = packing.pack([tree], [weight], rows=2, row_length=row_length)
    whole = packing.pack([tree], [weight], rows=1, row_length=max(unique, longest))
    trained = [
        sorted(
            (int(row["action_id"][i]), int(row["tokens"][i]), int(row["position"][i]))
            for row in rows_of(batches)
            for i in np.flatnonzero(row["loss_mask"])
        )
        for batches in (split, whole)
    ]
    assert trained[0] == trained[1]
    assert sum(b.coefficient.sum() for b in split) == pytest.approx(whole[0].coefficient.sum())
    assert loss(split) == pytest.approx(loss(whole), rel=1e-6, abs=1e-4)
    # Whole, there is nothing twice; split, there are only paths twice.
    assert packing.fill(whole)[0] == unique
    parts = sum(bool((b.tree_id[row] >= 0).any()) for b in split for row in range(2))
    assert unique <= packing.fill(split)[0] <= unique + parts * longest


def test_rows_are_as_short_as_the_smallest_bucket_that_holds_them():
    # Rows of 10 would be filled with 9, 8 + 2 and 2 + 2.
    made = layout.micro_batches([9, 8, 2, 2, 2], rows=2, buckets=[4, 8, 10])
    assert made == [(10, [[1, 2], [0]]), (4, [[3, 4]])]


def test_trees_that_fit_one_row_are_spread_over_shorter_ones():
    made = layout.micro_batches([4, 3, 3], rows=2, buckets=[3, 6, 10])
    assert made == [(6, [[0], [1, 2]])]


def test_rows_of_similar_fill_share_a_micro_batch():
    # First fit makes the rows 10, 6, 10 and 7 full: 6+4, 6, 5+5, 7 in the order of their longest.
    made = layout.micro_batches([7, 6, 6, 5, 5, 4], rows=2, buckets=[7, 10])
    assert made == [(10, [[1, 5], [3, 4]]), (7, [[0], [2]])]


@few
@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 4), st.sets(st.integers(1, 50)))
def test_every_part_is_in_one_row_that_has_room_for_it(lengths, rows, buckets):
    buckets = sorted({b for b in buckets if b <= 50} | {50})
    made = layout.micro_batches(lengths, rows, buckets)
    assert made == layout.micro_batches(lengths, rows, buckets)
    assert sorted(i for _, bins in made for row in bins for i in row) == list(range(len(lengths)))
    for length, bins in made:
        fullest = max(sum(lengths[i] for i in row) for row in bins)
        assert len(bins) <= rows and fullest <= length
        assert length == min(b for b in buckets if b >= fullest)
    slots = [
        sum(length for length, _ in m) for m in (made, layout.micro_batches(lengths, rows, [50]))
    ]
    assert slots[0] <= slots[1]


def test_trees_go_first_fit_longest_first():
    assert layout._first_fit_decreasing([3, 9, 5, 2, 6], 10) == [[1], [4, 0], [2, 3]]


def test_every_micro_batch_has_the_shape_of_a_bucket():
    trees = [random_trees.random_tree(s) for s in range(6)]
    weights = [random_trees.random_weights(t, 0) for t in trees]
    batches = packing.pack(trees, weights, rows=2, row_length=128, buckets=(96, 64))
    shapes = [{x.shape for x in arrays_of(b).values()} for b in batches]
    assert all(len(shape) == 1 for shape in shapes)
    assert set.union(*shapes) <= {(2, 64), (2, 96), (2, 128)}
    again = packing.pack(trees, weights, rows=2, row_length=128, buckets=(64, 96))
    for got, expected in zip(again, batches, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_without_buckets_every_micro_batch_has_the_same_shape():
    trees = [random_trees.random_tree(s) for s in range(6)]
    weights = [random_trees.random_weights(t, 0) for t in trees]
    batches = packing.pack(trees, weights, rows=2, row_length=128)
    shapes = {x.shape for b in batches for x in arrays_of(b).values()}
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


def test_a_path_longer_than_its_cap_is_refused():
    tree = random_trees.random_tree(1)
    weights = random_trees.random_weights(tree, 0)
    longest = longest_path(tree)
    packing.pack([tree], [weights], rows=1, row_length=500, path_length=longest)
    message = f"'random-1' has a path of {longest} tokens, but at most {longest - 1} are allowed"
    with pytest.raises(ValueError, match=rf"{message}: raise batch.path_length"):
        packing.pack([tree], [weights], rows=1, row_length=500, path_length=longest - 1)


def test_a_bucket_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"buckets=\(256,\): expected 1 to row_length=128"):
        packing.pack([], [], rows=1, row_length=128, buckets=(256,))


def test_a_fresh_decision_without_context_is_refused():
    tree = random_trees.random_tree(1, fresh_rate=1.0)
    tree.decisions()[1].context_ids = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="in the root's context_ids and in those of every fresh"):
        packing.pack([tree], [random_trees.random_weights(tree, 0)], rows=1, row_length=500)


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


# --- a critic's numbers -------------------------------------------------------------------------


def with_critic(tree: Tree, seed: int) -> packing.Weights:
    """Weights, and numbers of decisions: the weight is 0 where no return lies below."""
    rng = np.random.default_rng(seed)
    order = {id(a): i for i, a in enumerate(tree.actions())}
    kept = valid(tree)
    alive = [any(order[id(a)] in kept for a in d.actions) for d in tree.decisions()]
    return dataclasses.replace(
        random_trees.random_weights(tree, seed),
        value_target=rng.normal(size=len(alive)),
        value_prediction=rng.normal(size=len(alive)),
        value_weight=np.where(alive, rng.uniform(0.1, 1.0, len(alive)), 0.0),
    )


@few
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.4]))
def test_every_decision_has_its_value_once_where_an_action_of_it_begins(seed, masked_rate):
    tree = random_trees.random_tree(seed, masked_rate=masked_rate, fork_rate=0.5)
    critic = with_critic(tree, seed)
    batches = packing.pack([tree], [critic], rows=2, row_length=longest_path(tree) + 8, scale=0.5)
    decision_of = {id(a): i for i, d in enumerate(tree.decisions()) for a in d.actions}
    found = {}
    for row in rows_of(batches):
        for i in np.flatnonzero(row["value_weight"]):
            action = int(row["action_id"][i])
            before = row["parent"][i]
            assert before < 0 or row["action_id"][before] != action
            decision = decision_of[id(tree.actions()[action])]
            assert decision not in found
            found[decision] = [row[f"value_{x}"][i] for x in ("target", "prediction", "weight")]
    counted = np.flatnonzero(critic.value_weight)
    assert sorted(found) == counted.tolist()
    expected = [
        [critic.value_target[d], critic.value_prediction[d], 0.5 * critic.value_weight[d]]
        for d in counted
    ]
    if expected:
        np.testing.assert_allclose([found[d] for d in counted], expected, rtol=1e-6)


@few
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.4]))
def test_values_read_at_parents_come_back_by_decision(seed, masked_rate):
    tree = random_trees.random_tree(seed, masked_rate=masked_rate, fork_rate=0.5)
    # Two trees: where the numbers of each lie in the rows is not the same.
    trees = [tree, random_trees.random_tree(seed + 1)]
    weights = [random_trees.random_weights(t, seed) for t in trees]
    room = max(longest_path(t) for t in trees) + 8
    batches = packing.pack(trees, weights, rows=2, row_length=room)
    # A number of the parent and all before it: the same for all actions of a decision.
    values = []
    for batch in batches:
        value = np.zeros(batch.tokens.shape, np.float32)
        for r, row in enumerate(rows_of([batch])):
            for i, parent in enumerate(row["parent"]):
                chain = row["tokens"][ancestors(row["parent"], parent)]
                value[r, i] = np.dot(chain, np.arange(1.0, 1.0 + len(chain)))
        values.append(value)
    for number, (grown, per_action) in enumerate(
        zip(trees, packing.unpack(trees, batches, values), strict=True)
    ):
        said = packing.first_of_each_decision(grown, per_action)
        before = dict(zip(map(id, grown.actions()), sequences(grown), strict=True))
        for decision, value in zip(grown.decisions(), said, strict=True):
            action = decision.actions[0]
            chain = before[id(action)][: -len(action.token_ids)]
            order = {id(a): i for i, a in enumerate(grown.actions())}
            alive = any(order[id(a)] in valid(grown) for a in decision.actions)
            expected = np.dot(chain, np.arange(1.0, 1.0 + len(chain))) if alive else 0.0
            assert value == pytest.approx(expected, rel=1e-6), number


def test_numbers_that_do_not_fit_the_decisions_are_refused():
    tree = random_trees.random_tree(0)
    wrong = dataclasses.replace(with_critic(tree, 0), value_target=np.zeros(1))
    with pytest.raises(ValueError, match=r"decisions, but its value_target has shape \(1,\)"):
        packing.pack([tree], [wrong], rows=1, row_length=256)
