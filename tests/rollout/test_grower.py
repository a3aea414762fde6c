"""Trees are grown predictably, completely and reproducibly."""

import dataclasses
import time

import numpy as np
import pytest

from bpo_jax.ledger import Ledger
from bpo_jax.rollout.api import Answer, Turn
from bpo_jax.rollout.branching import Branching
from bpo_jax.sandbox import api
from tests.rollout import scripted, toys


def test_every_action_is_scored_as_a_full_forward_pass_of_its_whole_path_says():
    trees = toys.grow(n=2, roots=2, temperature=0.9)
    checked = 0
    for tree in trees:
        for pairs in toys.paths(tree):
            context: list[int] = []
            for decision, action in pairs:
                context += decision.context_ids.tolist()
                turn = action.token_ids.tolist()
                logprobs, entropies = toys.forward_scores(context, turn, 0.9)
                # Cached decoding against a full forward pass, float32.
                np.testing.assert_allclose(action.logprobs, logprobs, atol=1e-4)
                np.testing.assert_allclose(action.entropies, entropies, atol=1e-4)
                assert decision.entropy == pytest.approx(entropies[0], abs=1e-4)
                context += turn
                checked += 1
    assert checked > 20


def test_the_same_arguments_give_the_same_trees():
    first, second = (toys.grow(n=3, roots=2, seed=5) for _ in range(2))
    assert [toys.plain(t) for t in first] == [toys.plain(t) for t in second]
    other = toys.grow(n=3, roots=2, seed=6)
    assert [toys.plain(t) for t in first] != [toys.plain(t) for t in other]


def test_trees_have_their_roots_and_every_planned_child_and_end_everywhere():
    ledger = Ledger()
    rule = toys.branching(siblings=3, forks_per_root=2)
    trees = toys.grow(n=3, roots=2, rule=rule, ledger=ledger)
    for tree in trees:
        assert len(tree.root.actions) == 2
        for decision in tree.decisions():
            assert len(decision.actions) == decision.planned
            assert decision.snapshot is None
        for action in tree.actions():
            assert (action.next is None) == (action.end is not None)
    assert ledger.forks == sum(len(t.forks()) for t in trees) > 0
    assert ledger.returns == sum(len(t.leaves()) for t in trees)
    assert ledger.decoded == sum(len(a.token_ids) for t in trees for a in t.actions())
    assert ledger.sandbox_steps == sum(len(t.actions()) for t in trees)
    assert ledger.snapshots == ledger.forks + len(trees)


def test_what_siblings_share_is_computed_once():
    ledger = Ledger()
    # Six branches at most: each finds a slot when it is made.
    [tree] = toys.grow(n=1, rule=toys.branching(siblings=3, forks_per_root=1), ledger=ledger)
    decisions = tree.decisions()
    assert ledger.prefilled == sum(len(d.context_ids) for d in decisions)
    shared, before = 0, {id(tree.root): 0}
    for decision in decisions:
        length = before[id(decision)] + len(decision.context_ids)
        shared += (len(decision.actions) - 1) * length
        for action in decision.actions:
            before[id(action.next)] = length + len(action.token_ids)
    assert ledger.cache_saved == shared > 0


def test_forks_stay_within_the_budgets_of_root_and_tree():
    rule = toys.branching(forks_per_root=2, forks_per_tree=3, siblings=2, nested=True)
    for tree in toys.grow(n=4, roots=2, rule=rule):
        assert 0 < len(tree.forks()) <= 3
        for root in tree.root.actions:
            below, stack = 0, [root]
            while stack:
                decision = stack.pop().next
                if decision is not None:
                    below += len(decision.actions) > 1
                    stack += decision.actions
            assert below <= 2


def test_without_nesting_only_the_first_child_of_a_fork_forks_again():
    rule = toys.branching(forks_per_root=4, siblings=2)
    forks = 0
    for tree in toys.grow(n=4, roots=2, rule=rule):
        for fork in tree.forks():
            for sibling in fork.actions[1:]:
                while sibling.next is not None:
                    assert sibling.next.planned == 1
                    [sibling] = sibling.next.actions
            forks += 1
    assert forks > 4


def test_forks_are_charged_before_any_child_is_sampled():
    events: list[tuple] = []
    engine = scripted.Engine(events=events)

    class Watched(Branching):
        def decide(self, path, measure, budget):
            before = budget.tree
            children = super().decide(path, measure, budget)
            assert path.turn >= 1 and budget.tree == before + (children > 1)
            events.append(("decide", children))
            return children

    rule = Watched(toys.branching(siblings=3).config)
    trees = toys.grow(n=3, roots=2, rule=rule, engine=engine)
    assert sum(len(t.forks()) for t in trees) == sum(e == ("decide", 3) for e in events) > 0
    for at, event in enumerate(events):
        if event == ("decide", 3):
            kind, branch = events[at + 1]
            spoken = events.index(("say", branch), at)
            assert kind == "fork" and events[at:spoken].count(("fork", branch)) == 2


def test_the_number_of_children_does_not_depend_on_what_is_sampled_below():
    """Changes all that is sampled from one decision on: it and all before it stay as they were."""
    rule = toys.branching(siblings=3, forks_per_root=1, min_gap=2)
    trees = toys.grow(n=6, roots=1, rule=rule, engine=scripted.Engine())
    tree = next(t for t in trees if t.forks())
    backbone = toys.paths(tree)[0]
    at = next(i for i, (d, _) in enumerate(backbone) if d.planned > 1)
    length = sum(len(d.context_ids) for d, _ in backbone[: at + 1])
    length += sum(len(a.token_ids) for _, a in backbone[:at])
    others = toys.grow(n=6, roots=1, rule=rule, engine=scripted.Engine(salt_from=length))
    other = others[trees.index(tree)]
    for (a, _), (b, _) in zip(backbone[: at + 1], toys.paths(other)[0], strict=False):
        assert (a.planned, a.context_ids.tolist()) == (b.planned, b.context_ids.tolist())
    fork, changed = (toys.paths(t)[0][at][0] for t in (tree, other))
    assert [a.token_ids.tolist() for a in fork.actions] != [
        a.token_ids.tolist() for a in changed.actions
    ]
    assert len(changed.actions) == fork.planned


def test_siblings_start_from_the_state_of_their_fork():
    """Replaying each path's actions in one fresh sandbox gives the observations of the tree."""
    environment = toys.ScriptedEnvironment()
    for tree, task in zip(
        toys.grow(n=3, roots=2, environment=environment), toys.tasks(3), strict=True
    ):
        for pairs in toys.paths(tree):
            sandbox = environment.start(task)
            for _, action in pairs:
                result = sandbox.step(action.text)
                if action.next is not None:
                    assert action.next.observation == result.observation
                assert action.reward == result.reward
    assert environment.released > 0


def test_too_few_slots_delay_branches_but_change_no_token():
    ledger = Ledger()
    wide = toys.grow(n=3, roots=2, engine=toys.make_engine(slots=64))
    narrow = toys.grow(n=3, roots=2, engine=toys.make_engine(slots=3), ledger=ledger)

    def tokens(trees):
        return [[(a.token_ids.tolist(), a.end) for a in t.actions()] for t in trees]

    # The same seeds and contexts: only float rounding could tell the two apart.
    assert tokens(narrow) == tokens(wide)
    for tree in narrow:
        assert all(len(d.actions) == d.planned for d in tree.decisions())


def test_a_tree_does_not_depend_on_the_tasks_beside_it():
    alone = toys.grow(n=1, roots=2)
    beside = toys.grow(n=3, roots=2)

    def tokens(tree):
        return [a.token_ids.tolist() for a in tree.actions()]

    assert tokens(alone[0]) == tokens(beside[0])


def test_limits_of_turns_and_of_context_are_outcomes():
    trees = toys.grow(n=3, roots=2, rule=toys.branching(placement="none"), max_turns=2)
    ends = {leaf.end for t in trees for leaf in t.leaves()}
    assert ends <= {"done", "truncated"} and "truncated" in ends
    assert max(len(p) for t in trees for p in t.paths()) == 2
    trees = toys.grow(n=3, roots=2, rule=toys.branching(placement="none"), context=24)
    cut = 0
    for tree in trees:
        for pairs in toys.paths(tree):
            used = sum(len(d.context_ids) + len(a.token_ids) for d, a in pairs)
            assert used <= 24
            cut += pairs[-1][1].end == "truncated"
    assert cut > 0


def test_a_prompt_that_leaves_no_room_gives_a_tree_without_actions(monkeypatch, caplog):
    environment = toys.ScriptedEnvironment()
    prompt = environment.prompt

    def longer(task, first_observation):
        return prompt(task, first_observation + " 5" * 100 * (task.id == "task-1"))

    monkeypatch.setattr(environment, "prompt", longer)
    trees = toys.grow(n=3, environment=environment)
    assert [bool(t.root.actions) for t in trees] == [True, False, True]
    assert "leaves no room" in trees[1].info["error"]
    assert "task-1" in caplog.text
    [alone] = toys.grow(n=1, context=8)
    assert not alone.root.actions


def test_a_turn_without_an_action_is_answered_with_the_reason_and_pays_the_penalty():
    environment = toys.ScriptedEnvironment(invalid_every=3)
    ledger = Ledger()
    trees = toys.grow(n=3, environment=environment, ledger=ledger, invalid_penalty=0.25)
    actions = [a for t in trees for a in t.actions()]
    invalid = [a for a in actions if a.info.get("invalid")]
    assert invalid
    for action in invalid:
        assert action.reward == -0.25
        assert action.next is None or action.next.observation == "13"
    assert ledger.sandbox_steps == len(actions) - len(invalid)


def test_an_unreadable_turn_pays_what_the_environment_charges_as_well(monkeypatch):
    environment = toys.ScriptedEnvironment(invalid_every=3)
    parse = environment.parse

    def charged(text):
        command = parse(text)
        if isinstance(command, api.InvalidAction):
            return dataclasses.replace(command, penalty=0.5)
        return command

    monkeypatch.setattr(environment, "parse", charged)
    trees = toys.grow(n=3, environment=environment, invalid_penalty=0.25)
    paid = {a.reward for t in trees for a in t.actions() if a.info.get("invalid")}
    assert paid == {-0.75}


def test_two_engines_grow_the_trees_that_one_grows():
    first, second = toys.shared_engine(), toys.make_engine()
    one, two = (
        [[(a.token_ids.tolist(), a.end, a.reward) for a in t.actions()] for t in trees]
        for trees in (toys.grow(n=3), toys.grow(n=3, engines=[first, second]))
    )
    assert one == two


class Endless:
    """An engine of one branch that never comes to an end; it stands in for a long evaluation."""

    def __init__(self, error=None):
        self.error, self.free_slots, self.rounds = error, 1, 0

    def open(self, ids, seed):
        self.free_slots = 0
        return 0

    def read(self, branch):
        self.rounds += 1
        if self.error and self.rounds == 3:
            raise self.error
        self.answer = Answer(branch=branch, entropy=0.5)

    def say(self, branch, limit, markers=()):
        time.sleep(0.001)
        one = np.zeros(1, np.float32)
        turn = Turn(token_ids=np.array([5], np.int32), logprobs=one, entropies=one, finish="length")
        self.answer = Answer(branch=branch, turn=turn)

    def step(self):
        return [self.answer]

    def extend(self, branch, ids):
        pass

    def length(self, branch):
        return 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError()])
@pytest.mark.parametrize("place", [0, 1])
def test_what_stops_one_engine_stops_the_others_within_a_round(error, place):
    environment = toys.ScriptedEnvironment(invalid_every=1)  # no turn ends a trajectory
    environment.max_turns = 10**9
    engines = [Endless(), Endless()]
    engines[place].error = error
    with pytest.raises(type(error)):
        toys.grow(
            n=2, roots=1, rule=toys.branching(placement="none"), environment=environment,
            engines=engines, max_turns=10**9,
        )  # fmt: skip


def test_a_turn_cut_at_its_limit_gets_the_stop_token_into_the_context():
    [tree] = toys.grow(n=1)
    cut = [a for a in tree.actions() if a.next is not None and a.info.get("unfinished")]
    assert cut
    for action in cut:
        assert toys.STOP not in action.token_ids
        assert action.next.context_ids[0] == toys.STOP


@pytest.mark.parametrize("raises", [True, False])
def test_a_broken_sandbox_is_rebuilt_and_its_actions_replayed(raises):
    rule = toys.branching(min_gap=3)
    whole = [toys.plain(t) for t in toys.grow(n=2, rule=rule)]
    ledger = Ledger()
    faults = toys.Faults(breaks=frozenset({3, 9, 15, 22}), raises=raises)
    environment = toys.ScriptedEnvironment(faults)
    trees = toys.grow(n=2, rule=rule, environment=environment, ledger=ledger)
    # The same trees, token by token: nothing was sampled again.
    assert [toys.plain(t) for t in trees] == whole
    assert ledger.replayed_steps > 0
    assert ledger.sandbox_steps == sum(len(t.actions()) for t in trees)


def test_after_its_retries_a_leaf_is_masked_and_the_rest_of_the_tree_goes_on():
    ledger = Ledger()
    faults = toys.Faults(breaks=frozenset({6, 7}))
    environment = toys.ScriptedEnvironment(faults)
    trees = toys.grow(n=2, environment=environment, ledger=ledger, retries=0)
    leaves = [leaf for t in trees for leaf in t.leaves()]
    masked = [leaf for leaf in leaves if leaf.end == "masked"]
    assert len(masked) == 2
    assert all("gone" in leaf.info["error"] and len(leaf.token_ids) for leaf in masked)
    assert ledger.returns == len(leaves) - 2
    assert toys.shared_engine().free_slots == 8


def test_a_task_that_does_not_start_gives_a_tree_without_actions(monkeypatch):
    environment = toys.ScriptedEnvironment()
    start = environment.start

    def broken(task):
        if task.id == "task-1":
            raise toys.InfraError("no such machine")
        return start(task)

    monkeypatch.setattr(environment, "start", broken)
    trees = toys.grow(n=3, environment=environment)
    assert [bool(t.root.actions) for t in trees] == [True, False, True]
    assert trees[1].info["error"] == "no such machine"


def test_evaluation_is_one_greedy_trajectory_per_task():
    flat = toys.branching(placement="none")
    first, second = (toys.grow(n=4, roots=1, rule=flat, temperature=0.0, seed=s) for s in (1, 2))
    assert all(len(t.leaves()) == 1 and not t.forks() for t in first)
    assert [toys.plain(t) for t in first] == [toys.plain(t) for t in second]
