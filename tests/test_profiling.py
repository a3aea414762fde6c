"""A trace covers the updates asked for, and nothing else."""

import pytest

from bpo_jax import config as config_lib
from bpo_jax import profiling


def test_a_trace_is_written_when_its_last_update_is_over(tmp_path):
    profile = profiling.Profile("2:4", tmp_path / "profile")
    events = [(profile.enter(step), profile.tracing) for step in (1, 2, 3, 4, 5)]
    assert events == [(False, False), (False, True), (False, True), (True, False), (False, False)]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_an_interrupted_run_writes_the_trace_it_has(tmp_path):
    profile = profiling.Profile("1:9", tmp_path)
    profile.enter(1)
    assert profile.close() and not profile.close()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_without_steps_nothing_is_traced(tmp_path):
    profile = profiling.Profile(None, tmp_path / "profile")
    assert not profile.enter(0) and not profile.tracing
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("text", ["", "3", "3:3", "4:2", "0:2", "a:b", "1:2:3", "-1:2"])
def test_what_names_no_updates_is_refused(text):
    config = config_lib.base()
    config.profile.steps = text
    with pytest.raises(config_lib.ConfigError, match=r"profile\.steps"):
        config_lib.resolve(config)
