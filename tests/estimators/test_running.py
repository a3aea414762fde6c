"""Constants from earlier updates: nothing before the first, then running means."""

import json
import math

import pytest

from bpo_jax.estimators.running import RunningConstants


def make_diagnostics(**changes):
    values = {"B": 0.2, "W": 0.1, "root_variance": 0.3, "coefficient_sum": 12.0} | changes
    return {f"diag/{name}": value for name, value in values.items()}


def test_before_the_first_update_nothing_is_shrunk_or_scaled():
    constants = RunningConstants()
    assert constants.shrinkage(2) == ()
    assert constants.flow_normalizer == 1.0
    assert constants.baseline == 0.0


def test_the_first_update_counts_in_full_and_later_ones_by_the_memory():
    constants = RunningConstants(memory=0.75)
    constants.update(make_diagnostics(), length=6.0, mean_return=0.5)
    assert constants.shrinkage(2)[0].between == pytest.approx(0.2)
    constants.update(make_diagnostics(B=1.0), length=6.0, mean_return=0.5)
    assert constants.shrinkage(2)[0].between == pytest.approx(0.75 * 0.2 + 0.25 * 1.0)


def test_the_inherited_variance_is_that_of_a_mean_over_the_other_roots():
    constants = RunningConstants()
    constants.update(make_diagnostics(), length=6.0, mean_return=0.5)
    assert constants.shrinkage(4)[0].inherited == pytest.approx(0.3 / 3)
    assert constants.shrinkage(1) == ()


def test_updates_without_forks_leave_the_variances_alone():
    constants = RunningConstants()
    constants.update(make_diagnostics(), length=6.0, mean_return=0.5)
    before = constants.shrinkage(2)
    constants.update(make_diagnostics(B=math.nan, W=math.nan), length=6.0, mean_return=0.5)
    assert constants.shrinkage(2) == before


def test_the_baseline_is_the_mean_return_of_the_updates_before():
    constants = RunningConstants(memory=0.75)
    constants.update(make_diagnostics(), length=6.0, mean_return=2.0)
    assert constants.baseline == 2.0
    constants.update(make_diagnostics(), length=6.0, mean_return=math.nan)  # no tree had a return
    assert constants.baseline == 2.0
    constants.update(make_diagnostics(), length=6.0, mean_return=-1.0)
    assert constants.baseline == pytest.approx(0.75 * 2.0 - 0.25 * 1.0)


def test_the_flow_is_normalised_by_what_it_was_before_it_was_normalised():
    constants = RunningConstants(memory=0.0)
    constants.update(make_diagnostics(coefficient_sum=12.0), length=6.0, mean_return=0.5)
    assert constants.flow_normalizer == pytest.approx(2.0)
    # The next update's estimates were divided by 2: the same trees give half the sum.
    constants.update(
        make_diagnostics(coefficient_sum=6.0), length=6.0, mean_return=0.5, flow_normalizer=2.0
    )
    assert constants.flow_normalizer == pytest.approx(2.0)


def test_a_negative_estimate_of_the_variance_between_states_counts_as_zero():
    constants = RunningConstants()
    constants.update(make_diagnostics(B=-0.1), length=6.0, mean_return=0.5)
    assert constants.shrinkage(2)[0].between == 0.0


def test_the_state_survives_json():
    constants = RunningConstants()
    constants.update(make_diagnostics(), length=6.0, mean_return=0.5)
    other = RunningConstants()
    other.load_state_dict(json.loads(json.dumps(constants.state_dict())))
    assert other.state_dict() == constants.state_dict()
    assert other.shrinkage(2) == constants.shrinkage(2)
    assert other.baseline == constants.baseline == 0.5
