"""Trees come back from disk exactly as they were, and a damaged file is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax import tree_files
from bpo_jax.tree import Action, Decision, Tree
from tests.trees import random_tree

few = settings(max_examples=30, deadline=None)
numbers = st.floats(allow_nan=False, allow_infinity=False)
infos = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=5,
)


@st.composite
def any_tree(draw):
    """Everything that a tree may hold, in what a random one does not."""
    tree = random_tree(draw(st.integers(0, 10_000)), masked_rate=0.2, fresh_rate=0.3)
    tree.task_id = draw(st.text())
    tree.info = {"anything": draw(infos)}
    for decision in draw(st.permutations(tree.decisions()))[:2]:
        decision.entropy = draw(st.none() | numbers)
        decision.measure = draw(st.none() | numbers)
        decision.inclusion = draw(st.none() | st.floats(0.01, 1.0))
        decision.mid_turn = draw(st.booleans())
        decision.observation = draw(st.text())
    for action in draw(st.permutations(tree.actions()))[:2]:
        action.reward = draw(numbers)
        action.text = draw(st.text())
        action.info = {"anything": draw(infos)}
    return tree


def content(tree: Tree):
    """Everything in a tree, arrays as their bytes."""

    def fields(x):
        names = [f.name for f in dataclasses.fields(x) if f.name != "snapshot"]
        return {name: plain(getattr(x, name)) for name in names}

    def plain(x):
        if isinstance(x, np.ndarray):
            return x.dtype, x.tobytes()
        if isinstance(x, Decision | Action):
            return fields(x)
        if isinstance(x, list):
            return [plain(y) for y in x]
        return repr(x)  # tells -0.0 from 0.0, and True from 1

    return fields(tree)


def there_and_back(trees):
    with tempfile.TemporaryDirectory() as folder:
        tree_files.save(trees, folder)
        return tree_files.load(folder)


@few
@given(st.lists(any_tree(), max_size=3))
def test_trees_come_back_exactly(trees):
    assert [content(t) for t in there_and_back(trees)] == [content(t) for t in trees]


def test_text_that_is_no_valid_unicode_comes_back():
    (back,) = there_and_back([Tree(task_id="broken \udc80", root=Decision(observation="\ud800"))])
    assert (back.task_id, back.root.observation) == ("broken \udc80", "\ud800")


def test_no_trees_are_trees_too():
    assert there_and_back([]) == []


def test_a_tree_that_is_still_growing_comes_back_without_its_snapshots():
    open_end = Decision(snapshot=object())
    tree = Tree(task_id="open", root=Decision(actions=[Action(next=open_end)]))
    (back,) = there_and_back([tree])
    assert back.root.actions[0].next.actions == []
    assert back.root.actions[0].next.snapshot is None


def test_a_very_deep_tree_is_no_problem():
    root = at = Decision()
    for _ in range(5000):
        at.actions = [Action(next=Decision())]
        at = at.actions[0].next
    at.actions = [Action(end="done")]
    (back,) = there_and_back([Tree(task_id="deep", root=root)])
    assert len(back.actions()) == 5001


def test_numpy_scalars_in_an_info_become_plain(tmp_path):
    action = Action(
        end="done", info={"won": np.bool_(True), "score": np.float32(0.5), "at": (1, 2)}
    )
    tree_files.save([Tree(task_id="t", root=Decision(actions=[action]))], tmp_path)
    (back,) = tree_files.load(tmp_path)
    assert back.root.actions[0].info == {"won": True, "score": 0.5, "at": [1, 2]}


def test_saving_again_replaces_what_was_there(tmp_path):
    tree_files.save([random_tree(0), random_tree(1)], tmp_path)
    tree_files.save([random_tree(2)], tmp_path)
    assert [t.task_id for t in tree_files.load(tmp_path)] == ["random-2"]
    assert {p.name for p in tmp_path.iterdir()} == {tree_files.ARRAYS, tree_files.STRUCTURE}


def one_action(**fields) -> Tree:
    return Tree(task_id="t", root=Decision(actions=[Action(end="done", **fields)]))


def row(token: int, logprob: float = 0.5):
    """The arrays of an action with one token, as wide as NumPy makes them."""
    numbers = {"logprobs": logprob, "entropies": 0.0, "token_ids": token}
    return {name: np.array([number]) for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (one_action(info={"seen": {1, 2}}), r"action 0: info\['seen'\] is a set"),
        (one_action(info={"at": {1: 2}}), r"info\['at'\] is a dict"),
        (one_action(reward=float("nan")), "action 0: reward is nan"),
        (one_action(info={"x": float("inf")}), r"info\['x'\] is inf"),
        (one_action(**row(2**40)), "token_ids: expected a row of int32 numbers, found int64"),
        (one_action(**row(1, logprob=0.1)), "logprobs: expected a row of float32 numbers"),
        (one_action(token_ids=np.array([1, 2])), "one number each for every token"),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_and_nothing_is_written(tree, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tree_files.save([tree], tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- damaged files ------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    tree_files.save([random_tree(5, roots=2), random_tree(6)], tmp_path)
    return tmp_path


def refused(folder: pathlib.Path) -> str:
    with pytest.raises(tree_files.TreeFileError) as caught:
        tree_files.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def change(folder: pathlib.Path, edit) -> None:
    path = folder / tree_files.STRUCTURE
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))


def test_a_folder_without_trees_is_refused(tmp_path):
    assert "No such file" in refused(tmp_path)
    (tmp_path / tree_files.STRUCTURE).write_text('{"step": 1}')
    assert "holds no trees" in refused(tmp_path)


def test_a_missing_half_is_refused(saved):
    (saved / tree_files.ARRAYS).unlink()
    assert tree_files.ARRAYS in refused(saved)


@pytest.mark.parametrize("name", [tree_files.ARRAYS, tree_files.STRUCTURE])
def test_a_file_that_was_cut_anywhere_is_refused(saved, name):
    whole = (saved / name).read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        (saved / name).write_bytes(whole[:length])
        assert name in refused(saved)


def test_a_pickle_is_not_opened(saved):
    import pickle

    (saved / tree_files.ARRAYS).write_bytes(pickle.dumps({"token_ids": [1]}))
    assert "cannot be read" in refused(saved)


def decision(found, index=0):
    return found["trees"][0]["decisions"][index]


def action(found):
    return decision(found)["actions"][0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(version=2), "version 2, but this program reads 1"),
        (lambda c: c.update(trees={}), "'trees' is {}, expected a list"),
        (lambda c: c["trees"].append(3), "trees[2]: expected an object, found 3"),
        (lambda c: c["trees"][0].pop("task_id"), "trees[0]: 'task_id' is missing"),
        (lambda c: c["trees"][0].update(decisions=[]), "expected at least the root"),
        (lambda c: decision(c).pop("fresh"), "decisions[0]: 'fresh' is missing"),
        (lambda c: decision(c).update(planned=1.5), "'planned' is 1.5, expected a whole number"),
        (lambda c: decision(c).update(planned=True), "'planned' is True"),
        (lambda c: decision(c).update(context=10**6), "'context' is 1000000, which does not fit"),
        (lambda c: decision(c).update(context=-1), "'context' is -1"),
        (lambda c: action(c).update(tokens=0), "sampled tokens"),
        (lambda c: action(c).update(end="won"), "'end' is 'won'"),
        (lambda c: action(c).update(reward="1"), "'reward' is '1', expected a number"),
        (lambda c: action(c).update(next=0), "'next' is 0, expected a decision further down"),
        (lambda c: action(c).update(next=999), "'next' is 999"),
        (lambda c: action(c).update(next=None), "nothing leads to decision 1"),
        (lambda c: decision(c)["actions"][1].update(next=1), "that nothing else leads to"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(saved, edit, message):
    change(saved, edit)
    assert message in refused(saved)


def test_numbers_that_json_does_not_have_are_refused(saved):
    path = saved / tree_files.STRUCTURE
    path.write_text(path.read_text().replace('"reward": ', '"reward": NaN, "was": ', 1))
    assert "NaN is no number" in refused(saved)
    path.write_text(path.read_text().replace("NaN", "1e999"))
    assert "'reward' is inf, expected a finite number" in refused(saved)


def test_other_arrays_are_refused(saved):
    safetensors.numpy.save_file({"token_ids": np.zeros(3, np.int64)}, saved / tree_files.ARRAYS)
    assert "expected the rows context_ids (int32)" in refused(saved)
