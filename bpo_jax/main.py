"""Command line: ``python -m bpo_jax.main --config=configs/<task>.py --workdir=DIR``."""

from __future__ import annotations

import difflib
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from bpo_jax import config as config_lib

HELP = """\
Trains language-model agents by reinforcement learning on trees of trajectories.

  python -m bpo_jax.main --config=FILE.py --workdir=DIR [--mode=MODE] [--config.KEY=VALUE ...]

  --config=FILE.py     what to run; configs/quickstart.py needs no data and a few CPU minutes; a
                       file that takes an argument, FILE.py:ARGUMENT, says so in its first lines
  --workdir=DIR        where checkpoints, metrics.jsonl, summary.json and TensorBoard events go; the
                       same command with the same DIR resumes a run that was stopped
  --mode=MODE          train (default); eval: evaluate the newest checkpoint in DIR, or the initial
                       policy where there is none; warmstart: clone the environment's expert
  --config.KEY=VALUE   overrides one key, e.g. --config.algorithm.name=grpo --config.seed=1
  --help               this text; with --config also every key of that configuration

Keys are explained in bpo_jax/config.py and in the file given as --config. Ctrl-C ends a run with a
checkpoint. Exit codes: 0 done, 1 failed, 2 refused configuration, 130 interrupted.
"""


def parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Reads the command line into flags of its own, so that nothing global is touched.

    Returns:
      The flags, and the arguments that are none.

    Raises:
      ConfigError: an unknown flag or key, a value of the wrong type, a file that is not there.
    """
    overrides = [arg for arg in argv[1:] if _override_key(arg)]
    plain = [arg for arg in argv if not _override_key(arg)]
    # Without the overrides first: then a config that cannot be loaded and an override that does not
    # fit it are two different complaints.
    values, rest = _read(plain)
    config = values["config"].value
    if not overrides or config is None:
        return values, rest
    for override in overrides:
        _check_key(config, _override_key(override))
    return _read(argv)


def _read(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "", lock_config=True, flag_values=values, sys_argv=list(argv)
    )
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_string("mode", "train", "", flag_values=values)
    flags.DEFINE_bool("help", False, "", flag_values=values)
    try:
        rest = values(list(argv))
        if values["config"].value is not None:
            _ = values["config"].value.seed  # a file that failed to load says so on first use
    except flags.IllegalFlagValueError as error:
        raise config_lib.ConfigError(_illegal_value(str(error))) from error
    except flags.Error as error:
        raise config_lib.ConfigError(f"{error} (see --help)") from error
    except OSError as error:
        path = next(a.split("=", 1)[-1] for a in argv if a.lstrip("-").startswith("config="))
        raise config_lib.ConfigError(f"--config={path}: no such file") from error
    # What a config file raises while it is loaded may be anything.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[-1]
        raise config_lib.ConfigError(
            f"--config cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    return values, rest[1:]


def _override_key(argument: str) -> str:
    """The key of ``--config.KEY=VALUE`` (or ``--noconfig.KEY``); empty for any other argument."""
    name = argument.partition("=")[0].lstrip("-").removeprefix("no")
    return name.removeprefix("config.") if name.startswith("config.") else ""


def _check_key(config: config_dict.ConfigDict, key: str) -> None:
    section: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(section, config_dict.ConfigDict) or part not in section:
            known = list(section) if isinstance(section, config_dict.ConfigDict) else []
            near = difflib.get_close_matches(part, known, n=1, cutoff=0.6)
            where = ".".join(["config", *parts[:depth]])
            hint = f"did you mean {near[0]}?" if near else f"{where} has: {', '.join(known) or '-'}"
            raise config_lib.ConfigError(f"--config.{key}: unknown key; {hint}")
        section = section[part]


def _illegal_value(message: str) -> str:
    """ "flag --config.batch.tasks=x: reason" in the words of the other refusals."""
    flag, _, reason = message.partition(": ")
    hints = {"int()": "an integer", "float": "a number", "boolean": "true or false"}
    for kind, hint in hints.items():
        if kind in reason:
            return f"{flag.removeprefix('flag ')}: wrong type, expected {hint}"
    return f"{flag.removeprefix('flag ')}: {reason}"


def run(config: config_dict.ConfigDict, workdir: str, mode: str) -> int:
    """Runs one mode; imports JAX, so everything that can be refused was refused before."""
    import jax

    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    if mode == "warmstart":
        from bpo_jax import warmstart

        warmstart.run(config, workdir)
        return 0
    from bpo_jax import experiment

    if mode == "eval":
        experiment.evaluate(config, workdir)
        return 0
    return 130 if experiment.train(config, workdir)["status"] == "interrupted" else 0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        values, rest = parse(argv)
        if values["help"].value:
            print(HELP)
            if values["config"].value is not None:
                print(values["config"].value)
            return 0
        if rest:
            raise config_lib.ConfigError(
                f"unexpected argument {rest[0]!r}; flags are written --name=value (see --help)"
            )
        if values["config"].value is None:
            raise config_lib.ConfigError("--config is missing; e.g. --config=configs/quickstart.py")
        workdir = values["workdir"].value
        if not workdir:
            raise config_lib.ConfigError("--workdir is missing; e.g. --workdir=/tmp/quickstart")
        mode = str(values["mode"].value)
        config = config_lib.resolve(values["config"].value, mode=mode)
        _make_workdir(workdir)
        return run(config, workdir, mode)
    except KeyboardInterrupt:
        return 130
    except config_lib.ConfigError as error:
        print(f"bpo_jax: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if getattr(error, "one_line", False) and not os.environ.get("BPO_JAX_TRACEBACK"):
            print(f"bpo_jax: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1


def _make_workdir(workdir: str) -> None:
    try:
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config_lib.ConfigError(
            f"--workdir={workdir}: cannot be created ({error.strerror}); choose another folder"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv))
