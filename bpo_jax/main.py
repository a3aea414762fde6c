"""Command line: ``python -m bpo_jax.main --config=configs/<task>.py --workdir=DIR``."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from bpo_jax import config as config_lib
from bpo_jax import disk

HELP = """\
Trains language-model agents by reinforcement learning on trees of trajectories.

  python -m bpo_jax.main --config=FILE.py --workdir=DIR [--mode=MODE] [--config.KEY=VALUE ...]

  --config=FILE.py     what to run; configs/quickstart.py needs no data and a few CPU minutes; a
                       file that takes an argument, FILE.py:ARGUMENT, says so in its first lines
  --workdir=DIR        where checkpoints, metrics.jsonl, summary.json and TensorBoard events go; the
                       same command with the same DIR resumes a run that was stopped
  --mode=MODE          train (default); eval: evaluate the newest checkpoint in DIR, or the initial
                       policy where there is none; warmstart: clone the environment's expert;
                       export: write that policy as a folder for transformers and others
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
      ConfigError: an unknown flag or key, a value of the wrong type, a file that cannot be loaded.
    """
    try:
        lines = flags.FlagValues().read_flags_from_files(list(argv[1:]), force_gnu=False)
    except flags.Error as error:
        raise config_lib.ConfigError(f"--flagfile: {_one_line(error)}") from error
    plain: list[str] = []
    overrides: list[tuple[str, str]] = []
    for argument in _joined(lines):
        key = _override_key(argument)
        if key is None:
            plain.append(argument)
        else:
            overrides.append((key, argument))
    values = flags.FlagValues()
    for name in ("config", "workdir"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_string("mode", "train", "", flag_values=values)
    flags.DEFINE_bool("help", False, "", flag_values=values)
    rest = _read(values, [argv[0], *plain])
    file = values["config"].value
    if file is not None:
        del values.config
        _override(values, load_config(file), overrides)
    return values, rest


def _override(
    values: flags.FlagValues, config: config_dict.ConfigDict, overrides: list[tuple[str, str]]
) -> None:
    """Defines the flag ``config``: a configuration with the command line's changes."""
    empty: dict[str, bool] = {}
    for key, argument in overrides:
        _check_key(config, key, argument)
        empty[key] = argument.endswith("=None") and _may_be_none(key)
    argv = ["", *(argument for key, argument in overrides if not empty[key])]
    config_flags.DEFINE_config_dict(
        "config", config, "", lock_config=True, flag_values=values, sys_argv=argv
    )
    _read(values, argv)
    for key in (key for key, is_empty in empty.items() if is_empty):
        section, _, name = key.rpartition(".")
        place = config
        for part in section.split("."):
            place = place[part]
        place[name] = None


def _read(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses `argv` into `values`; returns what is no flag."""
    try:
        return list(values(list(argv))[1:])
    except flags.IllegalFlagValueError as error:
        raise config_lib.ConfigError(_illegal_value(_one_line(error))) from error
    except flags.Error as error:
        raise config_lib.ConfigError(f"{_one_line(error)} (see --help)") from error
    except (TypeError, ValueError) as error:  # of a value that its key's type cannot hold
        raise config_lib.ConfigError(f"--config: {_one_line(error)}") from error


def load_config(file: str) -> config_dict.ConfigDict:
    """What ``get_config`` of ``FILE.py`` or ``FILE.py:ARGUMENT`` returns.

    Raises:
      ConfigError: there is no such file, it fails, or it returns no configuration.
    """
    name, colon, argument = file.partition(":")
    path = pathlib.Path(name)
    if not path.is_file():
        raise config_lib.ConfigError(f"--config={name}: no such file")
    try:
        loader = importlib.machinery.SourceFileLoader("bpo_jax_config_file", str(path))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        config = module.get_config(argument) if colon else module.get_config()
    except KeyboardInterrupt:
        raise
    # What a file of Python raises while it is loaded may be anything, sys.exit included.
    except BaseException as error:
        raise config_lib.ConfigError(
            f"--config={file}: cannot be loaded: {type(error).__name__}: {_one_line(error)}"
        ) from error
    config_lib.check_shape(config)
    return config


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _joined(arguments: Sequence[str]) -> list[str]:
    """``--name value`` as ``--name=value``, for every flag that takes a value."""
    joined: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name = argument.lstrip("-")
        key = _override_key(argument)
        takes_value = name in ("config", "workdir", "mode") or (
            key is not None and not isinstance(_default(key), bool) and not name.startswith("no")
        )
        wanting = argument.startswith("-") and "=" not in argument and takes_value
        if wanting and left and not left[0].startswith("--"):
            argument = f"{argument}={left.pop(0)}"
        joined.append(argument)
    return joined


def _override_key(argument: str) -> str | None:
    """The key of ``--config.KEY=VALUE`` (or ``--noconfig.KEY``); None for any other argument."""
    name = argument.partition("=")[0].lstrip("-").removeprefix("no")
    if not argument.startswith("-") or not name.startswith("config."):
        return None
    return name.removeprefix("config.")


def _default(key: str) -> Any:
    """The default of a key; `key` itself where there is no such key."""
    value: Any = config_lib.base()
    for part in key.split("."):
        if not isinstance(value, config_dict.ConfigDict) or part not in value:
            return key
        value = value[part]
    return value


def _may_be_none(key: str) -> bool:
    return _default(key) is None


def _check_key(config: config_dict.ConfigDict, key: str, argument: str) -> None:
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
    if isinstance(section, config_dict.ConfigDict):
        raise config_lib.ConfigError(
            f"{argument}: a section, not a value; set one of its keys: {', '.join(section)}"
        )


def _illegal_value(message: str) -> str:
    """ "flag --config.batch.tasks=x: reason" in the words of the other refusals."""
    flag, _, reason = message.partition(": ")
    hints = {"int()": "an integer", "float": "a number", "boolean": "true or false"}
    for kind, hint in hints.items():
        if kind in reason:
            return f"{flag.removeprefix('flag ')}: wrong type, expected {hint}"
    return f"{flag.removeprefix('flag ')}: {reason}"


def run(config: config_dict.ConfigDict, workdir: str, mode: str) -> int:
    """Runs one mode; imports JAX, so nearly all that can be refused was refused before."""
    import jax

    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    config_lib.check_mesh(config, mode, jax.device_count())
    if mode == "warmstart":
        from bpo_jax import warmstart

        return 130 if warmstart.run(config, workdir)["status"] == "interrupted" else 0
    if mode == "export":
        from bpo_jax import export

        export.run(config, workdir)
        return 0
    from bpo_jax import experiment

    if mode == "eval":
        experiment.evaluate(config, workdir)
        return 0
    return 130 if experiment.train(config, workdir)["status"] == "interrupted" else 0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    workdir = None
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
        print(f"bpo_jax: {_one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        unwritable = disk.reason(error)
        if os.environ.get("BPO_JAX_TRACEBACK"):
            traceback.print_exc()
        elif getattr(error, "one_line", False):
            print(f"bpo_jax: {_one_line(error)}", file=sys.stderr)
        elif unwritable is not None:
            print(
                f"bpo_jax: --workdir={workdir}: {unwritable}; mend that, then the same command "
                "goes on from the last checkpoint",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
        # By name: importing the class would import JAX for every refusal.
        return 2 if type(error).__name__ == "ConfigMismatch" else 1


def _make_workdir(workdir: str) -> None:
    try:
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config_lib.ConfigError(
            f"--workdir={workdir}: cannot be created ({error.strerror}); choose another folder"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv))
