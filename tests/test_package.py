"""What a person who has just cloned the repository relies on."""

import ast
import importlib.metadata
import os
import pathlib
import re

import pytest

import bpo_jax

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", bpo_jax.__version__)


def test_installed_version_is_that_of_the_package():
    try:
        installed = importlib.metadata.version("bpo_jax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("bpo_jax is not installed here; launch/test.sh installs it")
    assert installed == bpo_jax.__version__


def test_readme_starts_the_main_job_and_the_tests_with_one_command_each():
    assert "\nbash launch/quickstart.sh\n" in README
    assert "\nbash launch/test.sh\n" in README


@pytest.mark.parametrize("name", sorted(set(re.findall(r"launch/\w+\.sh", README))))
def test_script_named_in_the_readme_can_be_executed(name):
    assert os.access(ROOT / name, os.X_OK)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/\w+\.py", README))))
def test_config_named_in_the_readme_exists(name):
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_says_the_command_that_runs_it(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"python -m bpo_jax.main --config=configs/{path.name}" in docstring


def test_ci_runs_the_readme_test_command():
    assert "\nbash launch/test.sh\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")
