"""Whole runs, small enough for a test: what they leave behind, how they survive being stopped."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from bpo_jax import config as config_lib
from bpo_jax import estimators, experiment
from bpo_jax.estimators.running import RunningConstants
from bpo_jax.learner import checkpoint as checkpoint_lib
from bpo_jax.report import metrics as metrics_lib
from bpo_jax.rollout.branching import Branching, BranchingConfig
from tests import tiny_policy
from tests.estimators import trees

CONFIG = """
from bpo_jax import config as config_lib

def get_config(arg=""):
    config = config_lib.base()
    config.environment.max_turns = 4
    config.policy.preset = {policy!r}
    config.policy.context = 384
    config.algorithm.roots = 2
    config.branching.forks_per_root = 1
    config.branching.siblings = 2
    config.branching.min_gap = 1
    config.rollout.action_tokens = 6
    config.rollout.slots = 8
    config.loss.kl_weight = 0.01
    config.batch.tasks = 2
    config.batch.rows = 1
    config.batch.row_length = 384
    config.budget.updates = 3
    config.eval.tasks = 3
    config.eval.every = 2
    config.checkpoint.every = 1
    return config
"""


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """Most of a tiny run is compiling, and all of these runs compile the same programs."""
    folder = str(tmp_path_factory.mktemp("xla"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))  # for the runs in processes of their own
        yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    path = folder / "task.py"
    path.write_text(CONFIG.format(policy=str(tiny_policy.write(folder))))
    return path


def make_config(config_file, **changes):
    module: dict = {}
    exec(config_file.read_text(), module)
    config = module["get_config"]()
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    return config_lib.resolve(config)


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory):
    """One uninterrupted run; tests read what it left."""
    workdir = tmp_path_factory.mktemp("finished")
    summary = experiment.train(make_config(config_file), str(workdir))
    return workdir, summary


def records(workdir):
    """The lines of metrics.jsonl without what may differ between two equal runs."""
    return [
        {name: value for name, value in record.items() if not name.startswith("time/")}
        for record in metrics_lib.read(pathlib.Path(workdir) / "metrics.jsonl")
    ]


def test_a_run_leaves_its_numbers_and_a_summary(finished):
    workdir, summary = finished
    assert json.loads((workdir / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["status"] == "finished"
    assert summary["updates"] == 3
    assert summary["eval/success_initial_count"] == summary["eval/success_final_count"] == 3
    assert list(workdir.glob("events.out.tfevents.*"))
    kinds = [(record["step"], record["kind"]) for record in records(workdir)]
    assert kinds == [
        (0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (3, "eval"),
    ]  # fmt: skip


def test_every_update_logs_the_agreed_numbers(finished):
    workdir, _ = finished
    lines = [r for r in metrics_lib.read(workdir / "metrics.jsonl") if r["kind"] == "train"]
    for line in lines:
        for name in (
            "loss/policy", "loss/kl", "loss/entropy", "rollout/success", "rollout/return",
            "rollout/length", "rollout/logprob_gap", "tree/roots", "tree/leaves", "tree/forks",
            "tree/depth", "tree/masked", "diag/grad_norm", "diag/grad_norm_var",
            "diag/clip_fraction", "diag/approx_kl", "diag/ess", "diag/padding", "diag/repeated",
            "ledger/decoded",
            "ledger/prefilled", "ledger/cache_saved", "ledger/sandbox_steps", "ledger/forks",
            "ledger/trained_unique", "ledger/trained_flat", "ledger/returns", "ledger/updates",
            "time/rollout", "time/pack", "time/score", "time/update", "time/wall",
            "time/wait_sandboxes", "time/wait_device", "ledger/probed", "tree/filtered",
        ):  # fmt: skip
            assert name in line
        assert line["tree/roots"] == 2
        assert line["ledger/updates"] == line["step"]
        # The learner and the sampler are two programs for one distribution.
        assert line["rollout/logprob_gap"] < 1e-4
        assert line["diag/skipped"] == 0
        assert 0 <= line["diag/padding"] < 1
        assert 0 <= line["diag/repeated"] < 1
    assert any(line["tree/forks"] > 0 for line in lines)
    assert lines[-1]["ledger/trained_unique"] < lines[-1]["ledger/trained_flat"]


def test_a_finished_run_started_again_only_repeats_its_summary(finished, config_file):
    workdir, summary = finished
    before = records(workdir)
    again = experiment.train(make_config(config_file), str(workdir))
    assert records(workdir) == before
    assert again["ledger"] == summary["ledger"]
    assert again["eval/success_final"] == summary["eval/success_final"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__filter": True, "rollout__deterministic": False},
        {"branching__entropy": "probe", "branching__probes": 3, "branching__probe_tokens": 3},
        {"branching__placement": "oracle", "branching__oracle_rollouts": 2},
        {"branching__boundary": "marker", "branching__markers": ("e",)},
        {"branching__placement": "uniform", "branching__initial_length": 3.0},
    ],
)
def test_other_ways_to_branch_go_through_a_whole_update(changes, config_file, tmp_path):
    config = make_config(config_file, budget__updates=1, eval__tasks=1, **changes)
    experiment.train(config, str(tmp_path))
    [line] = [r for r in records(tmp_path) if r["kind"] == "train"]
    # The tiny random policy never wins: no tree has returns that vary.
    assert line["tree/filtered"] == (2 if changes.get("rollout__filter") else 0)
    assert np.isfinite(line["diag/grad_norm"])
    assert line["ledger/probed"] >= 0 and np.isfinite(line["rollout/return"])
    if "branching__entropy" in changes or changes.get("branching__placement") == "oracle":
        assert line["ledger/probed"] > 0


@pytest.mark.parametrize(
    ("tree", "gamma", "vary"),
    [
        (trees.tree(trees.leaf(1.0), trees.leaf(0.0)), 1.0, True),
        (trees.tree(trees.leaf(0.3), trees.leaf(0.3)), 1.0, False),
        (trees.tree(trees.leaf(1.0), trees.masked()), 1.0, False),
        (trees.tree(trees.masked()), 1.0, False),
        (trees.tree(trees.edge(trees.leaf(1.0), trees.leaf(0.0))), 1.0, True),
        (trees.tree(trees.edge(trees.leaf(0.1), reward=0.2), trees.leaf(0.3)), 1.0, False),
        (trees.tree(trees.edge(trees.leaf(1.0)), trees.leaf(1.0)), 0.9, True),
    ],
)
def test_trees_to_learn_from_are_those_whose_returns_vary(tree, gamma, vary):
    assert experiment.returns_vary(tree, gamma) == vary


def test_another_algorithm_does_not_resume_it(finished, config_file):
    workdir, _ = finished
    config = make_config(config_file, algorithm__gamma=0.9)
    with pytest.raises(checkpoint_lib.ConfigMismatch, match=r"algorithm\.gamma=0\.9"):
        experiment.train(config, str(workdir))


def test_an_interrupted_run_resumes_as_if_it_had_not_been(
    finished, config_file, tmp_path, monkeypatch
):
    reference, _ = finished
    grow = experiment.Run.grow

    def interrupted(run):
        trees = grow(run)
        if run.step == 1:  # after the rollout: its tasks are drawn and its tokens are counted
            raise KeyboardInterrupt
        return trees

    monkeypatch.setattr(experiment.Run, "grow", interrupted)
    summary = experiment.train(make_config(config_file), str(tmp_path))
    assert summary["status"] == "interrupted"
    assert summary["updates"] == 1
    monkeypatch.undo()
    summary = experiment.train(make_config(config_file), str(tmp_path))
    assert summary["status"] == "finished"
    assert records(tmp_path) == records(reference)


def test_evaluating_a_checkpoint_gives_the_numbers_of_the_run(finished, config_file):
    workdir, summary = finished
    numbers = experiment.evaluate(make_config(config_file), str(workdir))
    assert numbers["step"] == 3
    assert numbers["eval/success"] == summary["eval/success_final"]
    written = json.loads((workdir / "eval-valid.json").read_text())
    assert written["eval/count"] == 3


def test_an_earlier_checkpoint_can_be_evaluated_with_other_settings(finished, config_file):
    workdir, _ = finished
    config = make_config(
        config_file, eval__step=2, eval__split="test", optimizer__weight_decay=0.1,
        environment__max_turns=3,
    )  # fmt: skip
    numbers = experiment.evaluate(config, str(workdir))
    assert numbers["step"] == 2
    assert numbers["eval/split"] == "test"


def test_a_budget_of_tokens_ends_a_run(config_file, tmp_path):
    config = make_config(config_file, budget__updates=None, budget__decoded_tokens=1)
    summary = experiment.train(config, str(tmp_path))
    assert summary["status"] == "budget"
    assert summary["updates"] == 1


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_grown(config_file, tmp_path):
    config = make_config(config_file, policy__context=40)
    with pytest.raises(config_lib.ConfigError, match=r"policy\.context=40"):
        experiment.train(config, str(tmp_path))


def test_turns_end_with_any_end_of_the_model_and_dialogues_are_checked(
    config_file, tmp_path, monkeypatch
):
    folder = tiny_policy.write(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    settings = {
        "policy__preset": str(folder),
        "rollout__check_dialogue": True,
        "rollout__overflow": "clip",
        "rollout__observation_tokens": 64,
    }
    run = experiment.Run(make_config(config_file, **settings), str(tmp_path))
    assert run.dialogue.stop_ids == (0, 1)
    check, checked = run.dialogue.check_tree, []

    def watch(tree, prompt):
        checked.append(tree)
        check(tree, prompt)

    monkeypatch.setattr(run.dialogue, "check_tree", watch)
    assert run.grow() == checked
    assert any(len(path) > 1 for tree in checked for path in tree.paths())


def main_command(config_file, workdir, *settings):
    return [
        sys.executable, "-m", "bpo_jax.main", f"--config={config_file}", f"--workdir={workdir}",
        *settings,
    ]  # fmt: skip


def run_killed(command, workdir, lines):
    """Kills a run once it has logged so many lines, then gives the same command again."""
    root = pathlib.Path(__file__).parent.parent
    process = subprocess.Popen(command, cwd=root)
    while len(metrics_lib.read(workdir / "metrics.jsonl")) < lines:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("lines", [pytest.param(1, id="update"), pytest.param(2, id="rollout")])
def test_a_killed_run_resumes_as_if_it_had_not_been(finished, config_file, tmp_path, lines):
    reference, _ = finished
    run_killed(main_command(config_file, tmp_path), tmp_path, lines)
    assert records(tmp_path) == records(reference)


@pytest.mark.slow
def test_a_killed_run_on_two_devices_resumes_as_if_it_had_not_been(config_file, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = (
        "--config.cpu_devices=2", "--config.mesh.data=-1", "--config.mesh.fsdp=1",
        "--config.batch.rows=2",
    )  # fmt: skip
    subprocess.run(
        main_command(config_file, whole, *settings),
        cwd=pathlib.Path(__file__).parent.parent, check=True, timeout=900,
    )  # fmt: skip
    run_killed(main_command(config_file, killed, *settings), killed, 2)
    assert len(records(whole)) == 6
    assert records(killed) == records(whole)


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_and_exit_code_130(config_file, tmp_path):
    command = main_command(config_file, tmp_path, "--config.budget.updates=100000")
    process = subprocess.Popen(
        command, cwd=pathlib.Path(__file__).parent.parent, stderr=subprocess.PIPE, text=True
    )
    while len(metrics_lib.read(tmp_path / "metrics.jsonl")) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in error
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    kept = checkpoint_lib.Checkpoints(tmp_path / "checkpoints").steps()
    assert kept[-1] == summary["updates"]


def test_a_critic_is_trained_beside_the_policy_and_alone_at_first(config_file, tmp_path):
    config = make_config(
        config_file, algorithm__name="ppo", branching__placement="threshold", loss__ratio="action",
        loss__importance_cap=2.0, loss__value_warmup=1, loss__value_clip=1.0, batch__epochs=2,
        rollout__invalid_penalty=0.5, budget__updates=2, log__gradient_directions=1,
    )  # fmt: skip
    experiment.train(config, str(tmp_path))
    first, second = (r for r in records(tmp_path) if r["kind"] == "train")
    assert first["loss/value"] > 0.0
    assert second["loss/value"] < first["loss/value"]
    assert first["loss/policy"] == 0.0
    assert first["diag/approx_kl"] < 1e-6  # nothing it samples from moved between its epochs
    assert second["loss/policy"] != 0.0
    assert second["diag/importance_capped"] == 0.0
    assert any(name.endswith("/gradient_variance_forked") for name in second)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(estimators.ALGORITHMS))
def test_every_algorithm_trains_on_the_trees_it_implies(name, config_file, tmp_path):
    config = make_config(
        config_file, algorithm__name=name, algorithm__roots=None, branching__forks_per_root=None,
        branching__siblings=None, branching__min_gap=2, rollout__invalid_penalty=0.5,
        budget__updates=2,
    )  # fmt: skip
    summary = experiment.train(config, str(tmp_path))
    assert summary["status"] == "finished"
    last = [r for r in records(tmp_path) if r["kind"] == "train"][-1]
    assert last["diag/skipped"] == 0
    assert np.isfinite(last["loss/policy"])
    if config.branching.placement == "none":
        assert last["tree/forks"] == 0.0


def bare_run(**algorithm):
    """A run without a policy, for what it does with trees once they are grown."""
    run = object.__new__(experiment.Run)
    config = config_lib.base()
    config.budget.updates = 1
    config.algorithm.update(algorithm)
    run.config = config_lib.resolve(config)
    run.algorithm = estimators.ALGORITHMS[run.config.algorithm.name]
    run.constants = RunningConstants()
    run.rule = Branching(BranchingConfig())
    run.grad_norms = []
    return run


def learn(run, grown, estimates):
    numbers = experiment.tree_metrics(grown, run.config.algorithm.gamma)
    numbers |= estimators.tree_diagnostics(grown, estimates, gamma=run.config.algorithm.gamma)
    run.learn_constants(grown, numbers | {"diag/grad_norm": 1.0})


def test_one_root_is_compared_with_the_returns_of_earlier_updates_only():
    run = bare_run(name="bpo", roots=1, gamma=0.5, baseline=True)
    grown = [trees.flat([4.0]), trees.tree(trees.edge(trees.leaf(4.0), reward=6.0))]
    first = run.estimate(grown)
    assert first[0].advantage == pytest.approx(4.0)
    np.testing.assert_allclose(first[1].advantage, [8.0, 4.0 - (0.0 - 6.0) / 0.5])
    learn(run, grown, first)
    # The mean return from the start: (4 + 6 + 0.5 * 4) / 2.
    assert run.estimate([trees.flat([7.0])])[0].advantage == pytest.approx(7.0 - 6.0)


def test_without_the_baseline_one_root_is_compared_with_nothing():
    run = bare_run(name="bpo", roots=1)
    grown = [trees.flat([4.0])]
    learn(run, grown, run.estimate(grown))
    assert run.estimate(grown)[0].advantage == pytest.approx(4.0)


@pytest.mark.parametrize("row_per_step, others", [(False, (6 + 2) / 2), (True, (3 * 6 + 2) / 4)])
def test_rloo_averages_over_trajectories_or_over_actions(row_per_step, others):
    run = bare_run(name="rloo", row_per_step=row_per_step)
    long, short, last = trees.edge(trees.edge(trees.leaf(6.0))), trees.leaf(2.0), trees.leaf(9.0)
    (result,) = run.estimate([trees.tree(long, short, last)])
    assert result.advantage[-1] == pytest.approx(9.0 - others)


def test_settings_go_to_the_estimator_by_their_name():
    forked = trees.tree(trees.edge(trees.leaf(3.0), trees.leaf(1.0)), trees.leaf(5.0))
    run = bare_run(name="gigpo", omega=0.25, gamma=0.5)
    (result,) = run.estimate([forked])
    expected = estimators.ALGORITHMS["gigpo"].estimate(forked, gamma=0.5, omega=0.25)
    np.testing.assert_array_equal(result.advantage, expected.advantage)


def test_seeds_have_names_of_their_own():
    seeds = {experiment.named_seed(*names) for names in [(0, 1, 0), (0, 1, 1), (0, 2), (1, 1, 0)]}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert np.unique([experiment.named_seed(0, 1, 5), experiment.named_seed(0, 1, 5)]).size == 1
