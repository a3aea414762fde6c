"""Where each placement forks, by what it judges, and what a tree says about it."""

import itertools
import math

import numpy as np
import pytest

from bpo_jax.ledger import Ledger
from bpo_jax.rollout.branching import Branching, BranchingConfig, Budget, Path
from bpo_jax.rollout.lines import entropy_of
from tests.rollout import scripted, toys


def grow(rule, **options):
    options.setdefault("engine", scripted.Engine())
    return toys.grow(rule=rule, **({"n": 8, "roots": 1} | options))


def fork_turns(tree):
    """Turns of the forks along the backbone of each root, in order."""
    found = []
    for action in tree.root.actions:
        turns, turn = [], 1
        while action.next is not None:
            if action.next.planned > 1:
                turns.append(turn)
            turn += not action.next.mid_turn
            action = action.next.actions[0]
        found.append(turns)
    return found


def test_fixed_forks_at_the_given_turns():
    rule = toys.branching(placement="fixed", turns=(1, 3), forks_per_root=5)
    turns = [t for tree in grow(rule) for t in fork_turns(tree)]
    assert set(map(tuple, turns)) <= {(), (1,), (1, 3)} and [1, 3] in turns


def test_uniform_forks_at_even_turns_of_the_expected_length():
    rule = toys.branching(placement="uniform", initial_length=4.0, forks_per_root=3)
    trees = grow(rule)
    assert max(fork_turns(t)[0] for t in trees) <= [1, 2, 3]
    assert any(fork_turns(t) == [[1, 2, 3]] for t in trees)
    rule.update(trees)
    assert rule.length == np.mean([len(p[0]) for p in map(toys.paths, trees)])
    again = Branching(rule.config)
    again.load_state_dict(rule.state_dict())
    assert again.length == rule.length


def test_random_forks_without_a_look_at_entropy():
    rule = toys.branching(placement="random", quantile=0.5, forks_per_root=9)
    flat = scripted.Engine(entropy=lambda ids: 0.0)
    shapes = [[fork_turns(t) for t in grow(rule, engine=e)] for e in (scripted.Engine(), flat)]
    assert shapes[0] == shapes[1]
    assert any(any(turns) for turns in shapes[0])


def test_a_gap_may_also_be_asked_for_in_tokens():
    near, far = (
        sum(len(t.forks()) for t in grow(toys.branching(forks_per_root=9, min_gap_tokens=n)))
        for n in (0, 12)
    )
    assert 0 < far < near
    path = Path(root=0, turn=2, since_fork=2, tokens_since_fork=11, backbone=True, seed=1)
    rule = toys.branching(min_gap_tokens=12)
    assert not rule.allows(path, Budget())


# After the trajectory has ended.


@pytest.mark.parametrize("roots", [1, 3])
def test_top_m_forks_the_decisions_of_greatest_entropy_of_each_backbone(roots):
    rule = toys.branching(placement="post_hoc_top_m", forks_per_root=2, siblings=3)
    environment, ledger = toys.ScriptedEnvironment(), Ledger()
    trees = grow(rule, environment=environment, roots=roots, ledger=ledger)
    for tree in trees:
        for action in tree.root.actions:
            below = []
            while action.next is not None:
                below.append(action.next)
                action = action.next.actions[0]
            best = sorted((d.entropy for d in below), reverse=True)[:2]
            assert sorted((d.entropy for d in below if d.planned > 1), reverse=True) == best
            assert all(len(d.actions) == d.planned for d in below)
    assert ledger.forks == sum(len(t.forks()) for t in trees) > 0
    assert environment.opened == environment.closed and environment.taken == environment.released


def test_top_m_keeps_its_distance():
    rule = toys.branching(placement="post_hoc_top_m", forks_per_root=9, min_gap=2)
    turns = [t for tree in grow(rule, n=20) for t in fork_turns(tree)]
    assert any(len(t) > 1 for t in turns)
    assert all(b - a >= 2 for t in turns for a, b in zip([0, *t], t, strict=False))


def test_the_backbone_of_a_post_hoc_tree_is_the_unforked_trajectory():
    plain = grow(toys.branching(placement="none"))
    forked = grow(toys.branching(placement="post_hoc_top_m"))
    assert sum(len(t.forks()) for t in forked) > 0
    for tree, other in zip(plain, forked, strict=True):
        for (_, a), (_, b) in zip(toys.paths(tree)[0], toys.paths(other)[0], strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()


def test_siblings_of_a_post_hoc_fork_start_from_its_snapshot():
    environment = toys.ScriptedEnvironment()
    rule = toys.branching(placement="post_hoc_top_m")
    for tree, task in zip(grow(rule, environment=environment), toys.tasks(8), strict=True):
        for pairs in toys.paths(tree):
            sandbox = environment.start(task)
            for _, action in pairs:
                result = sandbox.step(action.text)
                assert action.reward == result.reward
                assert action.next is None or action.next.observation == result.observation


def test_ht_records_the_probability_with_which_each_decision_was_to_be_forked():
    rule = toys.branching(placement="post_hoc_ht", forks_per_root=1, siblings=2)
    trees = grow(rule, n=40)
    expected, forked = 0.0, 0
    for tree in trees:
        backbone = [d for d, _ in toys.paths(tree)[0]][1:]
        total = sum(d.entropy for d in backbone)
        for decision in backbone:
            share = 0.9 * decision.entropy / total + 0.1 / len(backbone)
            assert decision.inclusion == pytest.approx(min(1.0, share))
            expected += decision.inclusion
            forked += decision.planned > 1
        assert tree.root.inclusion is None
    # Four standard deviations of a sum of independent draws, at most.
    assert abs(forked - expected) < 4 * math.sqrt(expected)
    assert 0 < forked < sum(len(toys.paths(t)[0]) - 1 for t in trees)


def test_ht_draws_with_the_frequency_it_records():
    rule = Branching(BranchingConfig(placement="post_hoc_ht", forks_per_root=2))
    counts = np.zeros(4)
    for seed in range(2000):
        paths = [Path(root=0, turn=t, since_fork=t, backbone=True, seed=seed) for t in (1, 2, 3, 4)]
        choice = rule.choose(list(zip(paths, (0.0, 0.5, 1.0, 9.0), strict=True)), Budget())
        counts[list(choice.forks)] += 1
    p = np.array(choice.inclusion)
    assert p[0] > 0 and p[3] == 1.0
    np.testing.assert_allclose(counts / 2000, p, atol=4 * 0.5 / math.sqrt(2000))


# What a decision is judged by.


def test_probes_measure_the_entropy_of_what_would_be_said_and_are_thrown_away():
    ledger, engine = Ledger(), scripted.Engine()
    rule = toys.branching(
        entropy="probe", probes=5, probe_tokens=2, initial_threshold=1.2, forks_per_root=9
    )
    trees = grow(rule, ledger=ledger, engine=engine)
    judged = [d for t in trees for d in t.decisions() if d.measure is not None]
    for decision in judged:
        assert 0.0 <= decision.measure <= math.log(5) + 1e-9
        assert (decision.planned > 1) == (decision.measure >= 1.2)
    assert len({d.planned for d in judged}) == 2
    assert ledger.decoded == sum(len(a.token_ids) for t in trees for a in t.actions())
    assert 5 * len(judged) <= ledger.probed <= 10 * len(judged)
    assert ledger.decoded + ledger.probed == engine.decoded
    rule.update(trees)
    assert rule.threshold == np.quantile([d.measure for d in judged], 0.7)


def test_trying_out_changes_nothing_of_what_is_sampled():
    judged = toys.branching(entropy="probe", initial_threshold=99.0)
    assert [toys.paths(t)[0][-1][1].token_ids.tolist() for t in grow(judged)] == [
        toys.paths(t)[0][-1][1].token_ids.tolist() for t in grow(toys.branching(placement="none"))
    ]


def test_the_entropy_of_probes_is_that_of_their_frequencies():
    assert entropy_of(["a"] * 4) == 0.0
    assert entropy_of(["a", "a", "b", "b"]) == pytest.approx(math.log(2))
    assert entropy_of(["a", "b", "b", "b"]) == pytest.approx(
        -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    )


def test_the_oracle_forks_where_the_returns_of_rollouts_spread():
    ledger, engine, environment = Ledger(), scripted.Engine(), toys.ScriptedEnvironment()
    rule = toys.branching(placement="oracle", oracle_rollouts=4, forks_per_root=9)
    trees = grow(rule, ledger=ledger, engine=engine, environment=environment)
    judged = [d for t in trees for d in t.decisions() if d.measure is not None]
    spreads = {round(float(np.std([1.0] * k + [0.0] * (4 - k), ddof=1)), 6) for k in range(5)}
    assert {round(d.measure, 6) for d in judged} <= spreads
    # The threshold is 0 here: any spread is enough, none is not.
    assert all((d.planned > 1) == (d.measure > 0) for d in judged)
    assert len({d.planned for d in judged}) == 2
    assert ledger.decoded + ledger.probed == engine.decoded and ledger.probed > ledger.decoded / 4
    assert environment.opened == environment.closed and environment.taken == environment.released
    assert not engine.branches


# Inside a turn.


def marked(**options):
    return toys.branching(boundary="marker", markers=("7",), **({"forks_per_root": 9} | options))


def test_a_turn_is_divided_at_its_first_marker_and_forked_there():
    trees = grow(marked(), n=12, max_turn_tokens=8)
    forks = [d for t in trees for d in t.forks()]
    assert forks and all(d.mid_turn for d in forks)
    for tree in trees:
        for pairs in toys.paths(tree):
            for (_, before), (decision, action) in itertools.pairwise(pairs):
                if decision.mid_turn:
                    words = before.text.split()
                    assert any("7" in w for w in words[-1:])
                    assert not any("7" in w for w in words[:-1])
                    assert not len(decision.context_ids) and before.reward == 0.0
                    assert decision.entropy is not None
                    # The first marker of a turn only.
                    assert action.next is None or not action.next.mid_turn


def test_the_sandbox_sees_the_whole_turn_once():
    environment, ledger = toys.ScriptedEnvironment(), Ledger()
    trees = grow(marked(), environment=environment, ledger=ledger, max_turn_tokens=8)
    for tree, task in zip(trees, toys.tasks(8), strict=True):
        for pairs in toys.paths(tree):
            sandbox, said = environment.start(task), []
            for _, action in pairs:
                said += action.token_ids.tolist()
                if action.next is not None and action.next.mid_turn:
                    continue
                result = sandbox.step(toys.NumberDialogue().text(said))
                said = []
                assert action.reward == result.reward
                if action.next is not None:
                    assert action.next.observation == result.observation
    assert ledger.sandbox_steps == sum(
        a.next is None or not a.next.mid_turn for t in trees for a in t.actions()
    )


def test_a_divided_turn_keeps_within_its_tokens():
    for tree in grow(marked(), n=12, max_turn_tokens=5):
        for pairs in toys.paths(tree):
            spoken = 0
            for decision, action in pairs:
                spoken = len(action.token_ids) + (spoken if decision.mid_turn else 0)
                assert spoken <= 5


def test_markers_divide_turns_of_the_real_engine_as_well():
    engine = toys.make_engine(decode=toys.NumberDialogue().text)
    trees = toys.grow(n=3, roots=2, rule=marked(siblings=2), engine=engine)
    checked = 0
    for tree in trees:
        for pairs in toys.paths(tree):
            context: list[int] = []
            for decision, action in pairs:
                context += decision.context_ids.tolist()
                turn = action.token_ids.tolist()
                logprobs, entropies = toys.forward_scores(context, turn, 1.0)
                np.testing.assert_allclose(action.logprobs, logprobs, atol=1e-4)
                assert decision.entropy == pytest.approx(entropies[0], abs=1e-4)
                context += turn
                checked += decision.mid_turn and decision.planned > 1
    assert checked > 0


@pytest.mark.parametrize("placement", ["fixed", "uniform", "random", "post_hoc_top_m", "oracle"])
def test_every_placement_works_inside_turns(placement):
    rule = marked(placement=placement, turns=(1, 2), quantile=0.5, initial_length=4.0)
    trees = grow(rule, n=12, max_turn_tokens=8)
    forks = [d for t in trees for d in t.forks()]
    assert forks and all(d.mid_turn for d in forks)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"placement": "fixed"}, "branching.turns"),
        ({"boundary": "marker"}, "branching.markers"),
        ({"placement": "post_hoc_top_m", "nested": True}, "branching.nested"),
        ({"placement": "oracle", "oracle_rollouts": 1}, "branching.oracle_rollouts"),
        ({"entropy": "probe", "probes": 0}, "branching.probes"),
        ({"placement": "best"}, "expected one of none, threshold"),
        ({"entropy": "all"}, "expected one of first_token, probe"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        BranchingConfig(**options)
