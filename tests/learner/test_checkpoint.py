"""Checkpoints are whole or not there, and belong to one policy and algorithm."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bpo_jax.learner import checkpoint as checkpoint_lib
from bpo_jax.learner.checkpoint import Checkpoints

CONFIG = {"algorithm": {"name": "bpo", "roots": 2}, "policy": {"init": "random"}}


def make_state(value):
    params = {"layers": {"w": jnp.full((2, 3), value, jnp.float32)}, "b": jnp.zeros(3)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(value)}


def make_record(step, **changes):
    return {"step": step, "config": CONFIG, "ledger": {"decoded": 10 * step}, **changes}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_is_saved_is_restored_exactly(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = make_state(3.0)
    checkpoints.save(3, state, make_record(3))
    step, restored, record = Checkpoints(tmp_path).restore(make_state(0.0), config=CONFIG)
    assert step == 3
    assert_same(restored, state)
    assert record == make_record(3)


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path / "new").restore(make_state(0.0)) is None


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(4):
        checkpoints.save(step, make_state(step), make_record(step))
    assert checkpoints.steps() == [2, 3]


def test_a_chosen_step_is_restored_or_said_to_be_missing(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), make_record(step))
    assert checkpoints.restore(make_state(0.0), step=1)[0] == 1
    with pytest.raises(checkpoint_lib.CheckpointError, match="step 7; there are: 1, 2"):
        checkpoints.restore(make_state(0.0), step=7)


def test_later_steps_can_be_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4, 6):
        checkpoints.save(step, make_state(step), make_record(step))
    assert checkpoints.restore(make_state(0.0), latest=5)[0] == 4
    assert checkpoints.restore(make_state(0.0), latest=6)[0] == 6
    assert checkpoints.restore(make_state(0.0), latest=1) is None


def test_another_algorithm_is_refused_with_the_key_and_both_values(tmp_path):
    Checkpoints(tmp_path).save(1, make_state(1.0), make_record(1))
    other = {**CONFIG, "algorithm": {"name": "grpo", "roots": 2}}
    with pytest.raises(checkpoint_lib.ConfigMismatch) as raised:
        Checkpoints(tmp_path).restore(make_state(0.0), config=other)
    assert "algorithm.name='grpo'" in str(raised.value)
    assert "'bpo'" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_the_sections_asked_for_are_compared(tmp_path):
    Checkpoints(tmp_path).save(1, make_state(1.0), make_record(1))
    policy = {"policy": {"init": "random"}}
    assert Checkpoints(tmp_path).restore(make_state(0.0), config=policy)[0] == 1


def damage_arrays(folder):
    for file in (folder / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


def damage_record(folder):
    for file in (folder / "record").iterdir():
        file.write_text("{")


def remove_state(folder):
    shutil.rmtree(folder / "state")


@pytest.mark.parametrize("damage", [damage_arrays, damage_record, remove_state])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), make_record(step))
    damage(tmp_path / "2")
    reopened = Checkpoints(tmp_path)
    step, state, _ = reopened.restore(make_state(0.0), config=CONFIG)
    assert step == 1
    assert_same(state, make_state(1))
    # Nothing is touched until the run goes on; then the step can be saved again.
    assert (tmp_path / "2").exists()
    reopened.save(2, make_state(2), make_record(2))
    assert (tmp_path / "unreadable-2").exists()
    assert reopened.restore(make_state(0.0))[0] == 2


def test_one_cut_off_while_it_was_written_is_as_if_it_were_not_there(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), make_record(step))
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    reopened = Checkpoints(tmp_path)
    assert reopened.steps() == [1]
    assert reopened.restore(make_state(0.0))[0] == 1


def test_when_none_can_be_read_the_error_is_one_line(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), make_record(1))
    damage_record(tmp_path / "1")
    with pytest.raises(checkpoint_lib.CheckpointError, match="no checkpoint can be read") as raised:
        Checkpoints(tmp_path).restore(make_state(0.0))
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), make_record(1))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(checkpoint_lib.CheckpointError, match="the disk is full") as raised:
        checkpoints.save(2, make_state(2), make_record(2))
    assert "\n" not in str(raised.value)
    assert Checkpoints(tmp_path).restore(make_state(0.0))[0] == 1


def test_a_disk_without_room_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1.0), make_record(1))
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(checkpoint_lib.CheckpointError, match="the disk is full"):
        checkpoints.save(2, make_state(2.0), make_record(2))
    assert checkpoints.steps() == [1]
    monkeypatch.undo()
    checkpoints.save(2, make_state(2.0), make_record(2))
    assert checkpoints.steps() == [1, 2]
