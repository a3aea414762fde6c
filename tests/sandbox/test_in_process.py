"""Forks in this process: equal at first, independent afterwards, and cheap."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.environments import alfworld
from bpo_jax.environments.alfworld import engine
from bpo_jax.sandbox.in_process import InProcessBackend


def _played(seed, choices, **settings):
    """A backend, and a sandbox after some admissible commands."""
    environment = alfworld.make(**settings)
    backend = InProcessBackend(environment=environment)
    stream = environment.tasks("train", seed)
    sandbox = backend.start(next(stream))
    sandbox.reset()
    for choice in choices:
        _step(sandbox, choice)
    return backend, sandbox


def _step(sandbox, choice):
    at = sandbox.snapshot()
    commands = engine.admissible(at.game, at.state)
    return sandbox.step(commands[choice % len(commands)])


CHOICES = st.lists(st.integers(0, 99), max_size=8)


@given(st.integers(0, 50), CHOICES, CHOICES)
@settings(max_examples=40, deadline=None)
def test_fork_continues_exactly_as_the_original(seed, before, after):
    backend, sandbox = _played(seed, before)
    (fork,) = backend.fork(sandbox.snapshot(), 1)
    assert fork.state_hash() == sandbox.state_hash()
    for choice in after:
        assert _step(fork, choice) == _step(sandbox, choice)
        assert fork.state_hash() == sandbox.state_hash()


@given(st.integers(0, 50), CHOICES, CHOICES)
@settings(max_examples=40, deadline=None)
def test_siblings_and_snapshot_are_independent(seed, before, after):
    backend, sandbox = _played(seed, before)
    snapshot, was = sandbox.snapshot(), sandbox.state_hash()
    one, two = backend.fork(snapshot, 2)
    for choice in after:
        _step(one, choice)
    assert two.state_hash() == was == sandbox.state_hash()
    assert backend.fork(snapshot, 1)[0].state_hash() == was


def test_fork_keeps_counting_turns():
    backend, sandbox = _played(0, [], max_turns=3)
    sandbox.step("look")
    (fork,) = backend.fork(sandbox.snapshot(), 1)
    assert not fork.step("look").truncated
    assert fork.step("look").truncated


def test_snapshot_cannot_be_changed():
    _, sandbox = _played(0, [3])
    snapshot = sandbox.snapshot()
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.turns = 0
    hash(snapshot.state)  # deep: every field of the state is immutable too


def test_snapshot_and_fork_take_microseconds():
    backend, sandbox = _played(0, [3, 4])
    start = time.perf_counter()
    for _ in range(1000):
        backend.release(sandbox.snapshot())
        backend.fork(sandbox.snapshot(), 2)
    # About 3 µs each here; the bound is loose for a busy machine.
    assert (time.perf_counter() - start) / 1000 < 500e-6


def test_fork_of_nothing_is_refused():
    backend, sandbox = _played(0, [])
    with pytest.raises(ValueError, match="at least one sandbox, got k=0"):
        backend.fork(sandbox.snapshot(), 0)
