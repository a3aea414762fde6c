"""The command line as a user meets it: a bad command is one clear line and exit code 2."""

import pathlib
import subprocess
import sys

import pytest

from bpo_jax import config as config_lib
from bpo_jax import main as main_lib

ROOT = pathlib.Path(__file__).parent.parent

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
        cwd=ROOT,
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
        (["--config", "nope.py"], "--config=nope.py: no such file"),
        (["--flagfile=/no/flags"], "--flagfile: "),
        (["--config={root}/configs/alfworld.py:foo"], "foo: expected one of tiny"),
        (["--config={root}/configs/alfworld.py:"], "--workdir is missing"),
        (["--config={config}", "--config.algorithm=grpo"], "a section, not a value"),
        (["--config={config}", "--config.=1"], "unknown key"),
        (["--config={config}", "--config.seed=None"], "wrong type, expected an integer"),
        (["--config={config}", "--config.seed"], "seed"),
        (["--config={config}", "--config.environment.data="], "--workdir is missing"),
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
    filled = [a.format(config=config_file, workdir=tmp_path / "run", root=ROOT) for a in arguments]
    assert main_lib.main(["main", *filled]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bpo_jax: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import module_that_is_not_there", "No module named 'module_that_is_not_there'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("open('/no/where.txt')", "No such file or directory: '/no/where.txt'"),
        ("def get_config(:", "SyntaxError"),
        ("x = 1", "no attribute 'get_config'"),
        ("def get_config(): return None", "the configuration is None"),
        ("def get_config(): raise ValueError('one\\ntwo')", "ValueError: one two"),
    ],
)
def test_a_config_file_that_fails_says_why(source, message, tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text(source + "\n")
    assert main_lib.main(["main", f"--config={path}", f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "no such file" not in error


@pytest.mark.parametrize("spelling", ["--config.budget.updates=None", "--config.budget.updates"])
def test_none_is_a_value_of_optional_keys(spelling, config_file):
    arguments = [spelling] if "=" in spelling else [spelling, "None"]
    values, _ = main_lib.parse(["main", "--config", str(config_file), *arguments, "--help"])
    assert values["config"].value.budget.updates is None
    assert values["help"].value


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (type("Full", (OSError,), {"one_line": True})("disk\nfull"), 1),
        (type("ConfigMismatch", (RuntimeError,), {"one_line": True})("another policy"), 2),
        (config_lib.ConfigError("found late"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_ends_a_run_early_has_an_exit_code(
    error, status, config_file, tmp_path, capsys, monkeypatch
):
    def fail(*_):
        raise error

    monkeypatch.setattr(main_lib, "run", fail)
    assert main_lib.main(["main", f"--config={config_file}", f"--workdir={tmp_path}"]) == status
    assert capsys.readouterr().err.count("\n") == (0 if status == 130 else 1)


def test_overrides_reach_the_config(config_file):
    values, rest = main_lib.parse(
        ["main", f"--config={config_file}", "--config.algorithm.name=grpo", "--config.seed=3"]
    )
    config = config_lib.resolve(values["config"].value)
    assert (config.algorithm.name, config.seed, rest) == ("grpo", 3, [])
