"""What is said when a file cannot be written."""

import errno
import subprocess
import sys

import pytest

from bpo_jax import disk
from tests import tiny_policy


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (PermissionError(errno.EACCES, "x"), "permission denied"),
        (ValueError("RESOURCE_EXHAUSTED: [os_error_code='28'] error"), "the disk is full"),
        (RuntimeError("Read-only file system (os error 30)"), "the file system is read-only"),
        (FileNotFoundError(errno.ENOENT, "x"), None),
        (ValueError("28"), None),
    ],
)
def test_the_cause_is_found_in_the_words_of_every_library(error, said):
    assert (disk.reason(error) or "").startswith(said or "")
    assert (disk.reason(error) is None) == (said is None)


def test_the_cause_is_found_behind_another_error():
    with pytest.raises(RuntimeError) as caught:
        try:
            raise OSError(errno.ENOSPC, "x")
        except OSError as error:
            raise RuntimeError("cannot save") from error
    assert disk.reason(caught.value) == "the disk is full (No space left on device)"


@pytest.mark.slow
def test_a_run_on_a_full_disk_says_so_in_one_line_and_goes_on_when_there_is_space(tmp_path):
    # A limit on the size of files stands for a full disk: it needs no rights to set.
    policy = tiny_policy.write(tmp_path)
    config = tmp_path / "config.py"
    config.write_text(
        "from bpo_jax import config as config_lib\n"
        "def get_config(arg=''):\n"
        "    config = config_lib.base()\n"
        "    config.environment.max_turns = 2\n"
        f"    config.policy.preset = {str(policy)!r}\n"
        "    config.policy.context = 384\n"
        "    config.rollout.action_tokens = 4\n"
        "    config.batch.tasks = config.batch.rows = 1\n"
        "    config.batch.row_length = 384\n"
        "    config.budget.updates = config.eval.tasks = 1\n"
        "    return config\n"
    )
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from bpo_jax import main;"
        "limit = int(sys.argv.pop()); limit and resource.setrlimit(resource.RLIMIT_FSIZE,"
        "(limit, resource.RLIM_INFINITY)); sys.exit(main.main(sys.argv))"
    )
    workdir = tmp_path / "run"
    command = [sys.executable, "-c", program, f"--config={config}", f"--workdir={workdir}"]
    full = subprocess.run([*command, "1000"], capture_output=True, text=True, timeout=600)
    assert full.returncode == 1
    # Threads of the checkpoint library may add words of their own.
    [said] = [line for line in full.stderr.splitlines() if line.startswith("bpo_jax: ")]
    assert "File too large" in said
    done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
