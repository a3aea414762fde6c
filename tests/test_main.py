"""The command line as a user meets it: a bad command is one clear line and exit code 2."""

import pathlib
import subprocess
import sys

import pytest

from bpo_jax import config as config_lib
from bpo_jax import main as main_lib

CONFIG = """
from bpo_jax import config as config_lib

def get_config(arg=""):
    config = config_lib.base()
    config.budget.updates = 1
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(CONFIG)
    return path


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "bpo_jax.main", *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=pathlib.Path(__file__).parent.parent,
    )


def test_a_refused_config_is_one_line_and_exit_code_2(config_file, tmp_path):
    result = run(
        f"--config={config_file}", f"--workdir={tmp_path / 'run'}", "--config.algorithm.name=sarsa"
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("bpo_jax: algorithm.name='sarsa'")
    assert not (tmp_path / "run").exists()


def test_a_refusal_comes_before_jax_is_imported(config_file, tmp_path):
    code = (
        "import sys; from bpo_jax import main; "
        f"rc = main.main(['main', '--config={config_file}', '--workdir={tmp_path}', '--mode=x']); "
        "assert 'jax' not in sys.modules; sys.exit(rc)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert result.returncode == 2, result.stderr


def test_help_says_how_to_start(capsys):
    assert main_lib.main(["main", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--config", "--workdir", "--mode", "warmstart", "resumes", "Ctrl-C"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing"),
        (["--config={config}"], "--workdir is missing"),
        (["--config=/no/file.py"], "--config=/no/file.py: no such file"),
        (["--config={config}", "--config.algoritm.name=grpo"], "did you mean algorithm?"),
        (["--config={config}", "--config.algorithm.nam=grpo"], "did you mean name?"),
        (["--config={config}", "--config.batch.tasks=many"], "wrong type, expected an integer"),
        (["--config={config}", "--config.batch.tasks=1.5"], "wrong type, expected an integer"),
        (["--config={config}", "--config.loss.clip_low=wide"], "wrong type, expected a number"),
        (["--config={config}", "--config.log.tensorboard=7up"], "expected true or false"),
        (["--config={config}", "--config.budget.updates=ten"], "wrong type, expected an integer"),
        (["--config={config}", "--bogus=1"], "bogus"),
        (["--config={config}", "--workdir={workdir}", "extra"], "unexpected argument 'extra'"),
        (["--config={config}", "--workdir={workdir}", "--mode=serve"], "--mode=serve: expected"),
        (["--config={config}", "--workdir=/proc/no", "--mode=eval"], "--workdir=/proc/no: cannot"),
        (
            ["--config={config}", "--workdir={workdir}", "--config.batch.minibatches=3"],
            "batch.minibatches=3: expected a divisor",
        ),
    ],
)
def test_a_bad_command_is_one_line_that_helps(arguments, message, config_file, tmp_path, capsys):
    filled = [a.format(config=config_file, workdir=tmp_path / "run") for a in arguments]
    assert main_lib.main(["main", *filled]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bpo_jax: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_config_file_that_fails_says_why(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("import module_that_is_not_there\n")
    assert main_lib.main(["main", f"--config={path}", f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "cannot be loaded" in error
    assert "module_that_is_not_there" in error


def test_overrides_reach_the_config(config_file):
    values, rest = main_lib.parse(
        ["main", f"--config={config_file}", "--config.algorithm.name=grpo", "--config.seed=3"]
    )
    config = config_lib.resolve(values["config"].value)
    assert (config.algorithm.name, config.seed, rest) == ("grpo", 3, [])
