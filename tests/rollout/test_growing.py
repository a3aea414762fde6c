"""The grower waits for nothing but what a branch itself needs, and leaves nothing behind."""

import collections
import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.ledger import Ledger
from bpo_jax.rollout import growth
from bpo_jax.rollout.grower import Grower
from bpo_jax.rollout.lines import Limits
from tests.rollout import scripted, toys


def facts(trees):
    return [toys.plain(t) for t in trees]


def assert_nothing_left(environment, engine):
    assert environment.opened == environment.closed > 0
    assert environment.taken == environment.released
    assert not engine.branches
    assert engine.free_slots == engine.slots


@pytest.mark.parametrize("order", [1, 2, 3])
def test_trees_are_the_same_in_whatever_order_things_become_ready(order):
    # Every decision forks: no branch could take another's part of a budget.
    rule = toys.branching(siblings=2, nested=True, forks_per_root=1000)
    still = facts(toys.grow(n=5, rule=rule, engine=scripted.Engine()))
    environment = scripted.SlowEnvironment(delay=lambda task, turns: 0.001 * (int(task[-1]) % 3))
    engine = scripted.Engine(delays=4, order=order)
    moved = toys.grow(
        n=5, rule=rule, engine=engine, environment=environment, deterministic=False, threads=8
    )
    assert facts(moved) == still
    assert_nothing_left(environment, engine)


def test_growing_in_threads_is_deterministic_where_it_is_asked_to_be():
    def grown():
        rule = toys.branching(siblings=3, forks_per_tree=2, nested=True)  # shared: order matters
        environment = scripted.SlowEnvironment(delay=lambda *_: 0.0005)
        engine = scripted.Engine(slots=5, delays=3, order=7)
        trees = toys.grow(n=4, rule=rule, engine=engine, environment=environment, threads=8)
        return facts(trees), engine.events

    assert grown() == grown()


def test_a_sandbox_that_is_a_hundred_times_slower_delays_only_its_own_branches():
    slow = 0.3
    environment = scripted.SlowEnvironment(
        delay=lambda task, turns: slow if task == "task-2" else slow / 100
    )
    began = time.monotonic()
    rule = toys.branching(placement="none")
    toys.grow(
        n=6, roots=1, rule=rule, engine=scripted.Engine(), environment=environment,
        deterministic=False, threads=8,
    )  # fmt: skip
    last = {task: at - began for task, at in environment.log}
    calls = collections.Counter(task for task, _ in environment.log)
    assert last["task-2"] > slow * calls["task-2"]
    # Start and reset of the slow one take two delays; by then the others have long finished.
    assert max(at for task, at in last.items() if task != "task-2") < slow


def test_sampling_goes_on_while_snapshots_and_forks_are_made():
    """A fork's children speak before their sandboxes exist."""
    said_early = []

    class Environment(scripted.SlowEnvironment):
        def fork(self, snapshot, k):
            time.sleep(0.05)
            said_early.append(engine.decoded)
            return super().fork(snapshot, k)

    engine = scripted.Engine()
    toys.grow(
        n=1, roots=4, rule=toys.branching(placement="none"), engine=engine,
        environment=Environment(), deterministic=False,
    )  # fmt: skip
    assert said_early[0] > 0


def test_waiting_is_counted_on_either_side():
    environment = scripted.SlowEnvironment(delay=lambda *_: 0.02)
    grower = _grower(environment, scripted.Engine(), deterministic=False)
    _grow(grower, n=1)
    assert 0.02 < grower.waits.sandboxes < 5.0

    class SlowEngine(scripted.Engine):
        def step(self):
            time.sleep(0.02)
            return super().step()

    environment = scripted.SlowEnvironment()
    grower = _grower(environment, SlowEngine(delays=2), deterministic=False)
    _grow(grower, n=4)
    assert grower.waits.device > 0.02


def _grower(environment, engine, **options):
    limits = {"max_turns": 6, "max_turn_tokens": 6, "context": 96} | options.pop("limits", {})
    return Grower(
        environment=environment,
        backend=environment,
        engines=[engine],
        dialogue=toys.NumberDialogue(),
        limits=Limits(**limits),
        **options,
    )


def _grow(grower, *, n=3, roots=2, rule=None, ledger=None):
    return grower.grow(
        toys.tasks(n),
        roots=roots,
        rule=rule or toys.branching(),
        seed=0,
        temperature=1.0,
        ledger=ledger if ledger is not None else Ledger(),
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    failing=st.sampled_from([0.02, 0.1, 0.4]),
    deterministic=st.booleans(),
    placement=st.sampled_from(["threshold", "random", "post_hoc_top_m", "post_hoc_ht", "oracle"]),
    boundary=st.sampled_from(["turn", "marker"]),
    slots=st.sampled_from([3, 7, 64]),
    retries=st.integers(0, 2),
    invalid_every=st.sampled_from([0, 3, 1]),
)
def test_whatever_fails_nothing_is_left_and_the_ledger_adds_up(
    seed, failing, deterministic, placement, boundary, slots, retries, invalid_every
):
    ledger = Ledger()
    environment = scripted.SlowEnvironment(failing=failing, seed=seed)
    environment.invalid_every = invalid_every
    engine = scripted.Engine(slots=slots, delays=3, order=seed)
    threads = threading.active_count()
    rule = toys.branching(
        placement=placement, siblings=3, boundary=boundary, markers=("7",), quantile=0.5
    )
    trees = toys.grow(
        n=4, rule=rule, engine=engine, environment=environment, ledger=ledger, retries=retries,
        deterministic=deterministic, threads=4,
    )  # fmt: skip
    assert_nothing_left(environment, engine)
    assert threading.active_count() == threads
    grown = [t for t in trees if t.root.actions]
    assert all(t.info["error"] == "the machine is gone" for t in trees if not t.root.actions)
    leaves = [leaf for t in grown for leaf in t.leaves()]
    masked = [leaf for leaf in leaves if leaf.end == "masked"]
    assert ledger.returns + len(masked) == len(leaves)
    actions = [a for t in grown for a in t.actions()]
    assert ledger.decoded == sum(len(a.token_ids) for a in actions)
    assert ledger.decoded + ledger.probed == engine.decoded
    assert all(len(a.token_ids) and (a.next is None) == (a.end is not None) for a in actions)
    assert ledger.forks == sum(len(t.forks()) for t in grown)
    assert ledger.snapshots == environment.taken
    for tree in grown:
        assert all(len(d.actions) == d.planned for d in tree.decisions())


def test_failures_change_no_tree_but_for_the_leaves_they_mask():
    whole = toys.grow(n=5, engine=scripted.Engine())
    environment = scripted.SlowEnvironment(failing=0.3, seed=3)
    broken = toys.grow(n=5, engine=scripted.Engine(), environment=environment, threads=0, retries=1)
    masked = 0
    pairs = zip(whole, broken, strict=True)
    decisions = [(t.root, u.root) for t, u in pairs if u.root.actions]
    while decisions:
        decision, other = decisions.pop()
        assert decision.planned == other.planned
        for action, twin in zip(decision.actions, other.actions, strict=True):
            assert action.token_ids.tolist() == twin.token_ids.tolist()
            if twin.end == "masked":
                masked += 1
                continue
            assert (action.reward, action.end) == (twin.reward, twin.end)
            if action.next is not None:
                decisions.append((action.next, twin.next))
    assert 0 < masked < sum(len(t.leaves()) for t in broken)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_an_engine_that_fails_leaves_nothing_behind(error):
    environment = scripted.SlowEnvironment(delay=lambda *_: 0.001)
    engine = scripted.Engine(fails_at=(9, error))
    threads = threading.active_count()
    with pytest.raises(type(error)):
        toys.grow(n=4, engine=engine, environment=environment, deterministic=False)
    assert_nothing_left(environment, engine)
    assert threading.active_count() == threads


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("place", ["start", "step", "snapshot", "fork"])
def test_a_bug_in_a_sandbox_ends_the_run_with_its_own_error(place, inline, deterministic):
    class Environment(scripted.SlowEnvironment):
        calls = 0

        def call(self, task, turns):
            with self.lock:
                Environment.calls += 1
                if Environment.calls == 4 and place == "step":
                    raise ZeroDivisionError("a bug")

        def start(self, task):
            if place == "start" and task.id == "task-2":
                raise ZeroDivisionError("a bug")
            return super().start(task)

        def fork(self, snapshot, k):
            if place == "fork":
                raise ZeroDivisionError("a bug")
            sandboxes = super().fork(snapshot, k)
            if place == "snapshot":
                sandboxes[0].snapshot = lambda: 1 / 0
            return sandboxes

    Environment.inline = inline
    environment, engine = Environment(), scripted.Engine()
    rule = toys.branching(nested=True)
    with pytest.raises(ZeroDivisionError):
        toys.grow(
            n=4, rule=rule, engine=engine, environment=environment, deterministic=deterministic
        )
    assert_nothing_left(environment, engine)


def test_a_sandbox_that_hangs_does_not_keep_a_run_from_ending(monkeypatch):
    monkeypatch.setattr(growth, "PATIENCE", 0.05)
    release = threading.Event()

    class Environment(scripted.SlowEnvironment):
        def call(self, task, turns):
            if task == "task-1" and turns:
                release.wait(10)

    environment = Environment()
    engine = scripted.Engine(fails_at=(30, KeyboardInterrupt()), delays=20)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        toys.grow(n=3, engine=engine, environment=environment, deterministic=False)
    assert time.monotonic() - began < 5
    assert not engine.branches
    release.set()  # then it is closed by the thread that was in it
    for _ in range(100):
        if environment.opened == environment.closed:
            break
        time.sleep(0.02)
    assert environment.opened == environment.closed


def test_a_call_that_takes_too_long_is_a_failure_and_its_sandbox_is_closed_later():
    ledger = Ledger()
    slept = []

    class Environment(scripted.SlowEnvironment):
        def call(self, task, turns):
            with self.lock:
                late = turns == 1 and not slept
                slept.extend([task] * late)
            if late:
                time.sleep(0.4)

    whole = facts(toys.grow(n=2, engine=scripted.Engine()))
    environment, engine = Environment(), scripted.Engine()
    trees = toys.grow(n=2, engine=engine, environment=environment, ledger=ledger, step_seconds=0.15)
    assert slept and facts(trees) == whole and ledger.replayed_steps >= 0
    time.sleep(0.5)
    assert_nothing_left(environment, engine)


def test_where_no_call_is_in_time_branches_are_masked():
    environment = scripted.SlowEnvironment(delay=lambda task, turns: 0.1 * (turns > 0))
    trees = toys.grow(
        n=1, roots=2, rule=toys.branching(placement="none"), environment=environment,
        engine=scripted.Engine(), step_seconds=0.02, retries=1,
    )  # fmt: skip
    leaves = [leaf for t in trees for leaf in t.leaves()]
    assert any("within 0.02 seconds" in leaf.info.get("error", "") for leaf in leaves)
    assert all(leaf.end == "masked" for p in trees[0].paths() if len(p) > 1 for leaf in p[-1:])


def test_seconds_are_an_outcome_counted_over_a_trajectorys_turns():
    class Clock:
        now = 0.0

        def __call__(self):
            Clock.now += 1.0
            return Clock.now

    trees = toys.grow(
        n=4, rule=toys.branching(placement="none"), engine=scripted.Engine(), max_seconds=3.0,
        clock=Clock(),
    )  # fmt: skip
    ends = collections.Counter(leaf.end for t in trees for leaf in t.leaves())
    assert ends["truncated"] and not ends["masked"]
    plain = toys.grow(n=4, rule=toys.branching(placement="none"), engine=scripted.Engine())
    assert sum(len(t.actions()) for t in trees) < sum(len(t.actions()) for t in plain)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"placement": "threshold"}, 1),
        ({"placement": "post_hoc_top_m", "forks_per_root": 3}, 1),
        ({"entropy": "probe", "initial_threshold": 0.5}, 2),  # one of them is for the probes
        ({"placement": "oracle"}, 2),
    ],
)
def test_seconds_do_not_count_while_a_branch_waits(options, slots):
    """Branches go on one after the other, and every turn that is sampled takes a second."""
    rule = toys.branching(**options)
    whole = toys.grow(n=2, roots=2, rule=rule, engine=scripted.Engine(slots=slots))
    engine = scripted.Engine(slots=slots)
    limited = toys.grow(
        n=2, roots=2, rule=rule, engine=engine, max_seconds=6.5,
        clock=lambda: float(sum(kind == "say" for kind, _ in engine.events)),
    )  # fmt: skip
    # None has more than six turns of its own.
    assert facts(limited) == facts(whole)
    assert sum(len(t.actions()) for t in whole) > 12


@pytest.mark.parametrize("deterministic", [True, False])
def test_snapshots_outlive_the_forks_that_are_made_of_them(deterministic):
    """Turns without an action end their branches before the sandboxes have been forked."""

    class Environment(scripted.SlowEnvironment):
        def call(self, task, turns):
            time.sleep(0.002)

        def fork(self, snapshot, k):
            assert self.released < self.taken
            return super().fork(snapshot, k)

    environment = Environment()
    environment.invalid_every = 1
    for _ in range(10):
        toys.grow(
            n=3, roots=3, engine=scripted.Engine(), environment=environment, max_turns=1,
            deterministic=deterministic,
        )  # fmt: skip
    assert environment.taken == environment.released > 0
    assert environment.opened == environment.closed


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_sandbox_raises_in_its_thread_ends_the_run(error):
    class Environment(scripted.SlowEnvironment):
        def call(self, task, turns):
            if turns == 1:
                raise error

    environment, engine = Environment(), scripted.Engine()
    with pytest.raises(type(error)):
        toys.grow(n=3, engine=engine, environment=environment)
    assert_nothing_left(environment, engine)


def test_closing_and_releasing_have_their_limit_as_well():
    hanging = threading.Event()

    class Sandbox(scripted.SlowSandbox):
        def close(self):
            hanging.wait(5)
            super().close()

    class Environment(scripted.SlowEnvironment):
        def start(self, task):
            return Sandbox(self, task)

        def release(self, snapshot):
            hanging.wait(5)
            super().release(snapshot)

    began = time.monotonic()
    toys.grow(n=1, roots=2, engine=scripted.Engine(), environment=Environment(), step_seconds=0.05)
    assert time.monotonic() - began < 2
    hanging.set()


def test_what_fails_while_breaking_off_hides_neither_the_error_nor_the_rest():
    class Sandbox(scripted.SlowSandbox):
        def close(self):
            super().close()
            raise ZeroDivisionError("a bug in close")

    class Environment(scripted.SlowEnvironment):
        def start(self, task):
            return Sandbox(self, task)

    environment = Environment()
    engine = scripted.Engine(fails_at=(5, RuntimeError("the engine")), delays=9)
    with pytest.raises(RuntimeError, match="the engine"):
        toys.grow(n=3, engine=engine, environment=environment)
    assert_nothing_left(environment, engine)


def test_turns_without_an_action_in_a_row_end_a_trajectory():
    environment = toys.ScriptedEnvironment(invalid_every=1)
    trees = toys.grow(n=3, environment=environment, engine=scripted.Engine(), max_invalid=2)
    assert {len(p) for t in trees for p in t.paths()} == {2}
    assert {p[-1].end for t in trees for p in t.paths()} == {"truncated"}
    mixed = toys.ScriptedEnvironment(invalid_every=2)
    trees = toys.grow(n=6, environment=mixed, engine=scripted.Engine(), max_invalid=2)
    for tree in trees:
        for path in tree.paths():
            flags = [bool(a.info.get("invalid")) for a in path]
            pairs = [a and b for a, b in itertools.pairwise(flags)]
            assert not any(pairs[:-1])
            if pairs and pairs[-1]:
                assert path[-1].end == "truncated"


def test_children_are_recorded_in_the_order_of_their_seeds_whatever_ends_first():
    rule = toys.branching(siblings=4, forks_per_root=1)
    still = toys.grow(n=4, rule=rule, engine=scripted.Engine())
    moved = toys.grow(n=4, rule=rule, engine=scripted.Engine(slots=3, delays=9, order=5))
    assert facts(still) == facts(moved)


def test_one_slot_is_enough():
    assert facts(toys.grow(n=3, engine=scripted.Engine(slots=1))) == facts(
        toys.grow(n=3, engine=scripted.Engine())
    )


def test_a_rule_that_tries_things_out_needs_a_slot_for_them():
    rule = toys.branching(entropy="probe")
    with pytest.raises(ValueError, match=r"rollout\.slots"):
        toys.grow(n=1, rule=rule, engine=scripted.Engine(slots=1))
    assert toys.grow(n=2, rule=rule, engine=scripted.Engine(slots=2))[0].root.actions


def test_a_released_snapshot_that_fails_does_not_stop_growing(monkeypatch):
    environment = scripted.SlowEnvironment()

    def release(snapshot):
        raise scripted.InfraError("no such layer")

    monkeypatch.setattr(environment, "release", release)
    assert toys.grow(n=2, environment=environment, engine=scripted.Engine())[1].root.actions
