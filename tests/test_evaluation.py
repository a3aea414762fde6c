"""What an evaluation counts, and what it leaves out."""

import math

import numpy as np

from bpo_jax import evaluation
from bpo_jax.sandbox.api import Task
from bpo_jax.tree import Action, Decision, Tree


def played(kind, end="done", *, won=False, turns=1, reward=0.0):
    """The tree of a task with one trajectory; none where `end` is empty."""
    tree = Tree(task_id=kind, root=Decision(context_ids=np.zeros(1, np.int32)))
    tree.info["kind"] = kind
    decision = tree.root
    for turn in range(turns if end else 0):
        one = np.zeros(1, np.float32)
        action = Action(token_ids=np.zeros(1, np.int32), logprobs=one, entropies=one, text="")
        decision.actions.append(action)
        if turn == turns - 1:
            action.end, action.reward, action.info["won"] = end, reward, won
        else:
            decision = action.next = Decision(context_ids=np.zeros(1, np.int32))
    return tree


class Grown:
    """A grower whose trees are given."""

    def __init__(self, trees):
        self.trees = trees

    def grow(self, tasks, *, roots, rule, seed, temperature, ledger):
        assert roots == 1 and rule.config.placement == "none"
        return self.trees


def evaluate(*trees):
    tasks = [Task(id=str(i), kind=tree.info["kind"]) for i, tree in enumerate(trees)]
    return evaluation.evaluate(Grown(trees), tasks, split="valid", seed=0, temperature=0.4)


def test_successes_are_counted_in_all_and_by_kind():
    numbers = evaluate(
        played("put", won=True, turns=3, reward=1.0),
        played("put", "truncated", turns=5),
        played("heat", won=True, turns=4, reward=1.0),
    )
    assert (numbers["eval/count"], numbers["eval/successes"]) == (3, 2)
    assert numbers["eval/success"] == numbers["eval/score"] == 2 / 3
    assert numbers["eval/turns"] == 4
    assert numbers["eval/put/success"] == 0.5
    assert numbers["eval/heat/count"] == 1
    assert (numbers["eval/masked"], numbers["eval/split"]) == (0, "valid")


def test_tasks_lost_to_failures_count_as_masked_and_nowhere_else():
    numbers = evaluate(
        played("put", won=True, reward=1.0),
        played("put", "masked", turns=2, reward=5.0),
        played("heat", end=""),
    )
    assert numbers["eval/masked"] == 2
    assert numbers["eval/count"] == numbers["eval/put/count"] == 1
    assert numbers["eval/success"] == numbers["eval/score"] == numbers["eval/turns"] == 1.0
    assert "eval/heat/count" not in numbers


def test_where_nothing_was_played_there_is_no_rate():
    numbers = evaluate(played("put", end=""))
    assert (numbers["eval/count"], numbers["eval/masked"]) == (0, 1)
    assert math.isnan(numbers["eval/success"])
