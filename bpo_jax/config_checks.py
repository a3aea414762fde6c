"""What refuses a configuration that cannot work, before JAX is imported."""

from __future__ import annotations

import datetime
import difflib
import importlib
import importlib.util
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import config_dict

from bpo_jax import estimators, packaged, profiling
from bpo_jax.estimators import bpo_paper
from bpo_jax.rollout import branching as branching_lib

MODES = ("train", "eval", "warmstart", "export")
PRESETS = (
    "tiny", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b",
    "qwen2.5-32b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b",
    "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b",
)  # fmt: skip
"""The names in `bpo_jax.models.presets`, which cannot be imported without JAX."""


class ConfigError(ValueError):
    """A configuration that cannot work.

    The message is one line: the key, its value, what was expected, what to do.
    """


def check_shape(config: Any, defaults: config_dict.ConfigDict, prefix: str = "") -> None:
    """Checks that a config has the keys of `defaults` and no others, with values of their types.

    ``environment.settings`` is the factory's: its keys may be others.

    Raises:
      ConfigError: no config at all, a key missing or unknown, or a value of another type.
    """
    if not isinstance(config, config_dict.ConfigDict):
        where = prefix.rstrip(".") or "the configuration"
        raise ConfigError(
            f"{where} is {config!r}: expected a ConfigDict; get_config must return "
            "bpo_jax.config.base() with its changes"
        )
    free = prefix == "environment.settings."
    for name in config:
        if name not in defaults and not free:
            near = difflib.get_close_matches(name, list(defaults), n=1, cutoff=0.6)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(defaults)}"
            raise ConfigError(f"{prefix}{name}: unknown key; {hint}")
    for name in defaults:
        key = prefix + name
        if name not in config:
            if free:
                continue
            raise ConfigError(f"{key}: missing; start get_config from bpo_jax.config.base()")
        value, default = config[name], defaults[name]
        if isinstance(default, config_dict.ConfigDict):
            check_shape(value, default, f"{key}.")
        elif not (value is None and default is None):
            _check_type(key, value, defaults.get_type(name), optional=default is None)


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}


def _check_type(key: str, value: Any, kind: type, *, optional: bool) -> None:
    accepted: tuple[type, ...] = {float: (int, float), tuple: (tuple, list)}.get(kind, (kind,))
    if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
        if kind is not str or value or key.startswith("environment.settings."):
            return
        raise ConfigError(f"{key}='': expected a text" + (", or None" if optional else ""))
    expected = _TYPE_NAMES.get(kind, f"a {kind.__name__}") + (" or None" if optional else "")
    raise ConfigError(f"{key}={value!r}: wrong type, expected {expected}")


def validate(
    config: config_dict.ConfigDict, defaults: config_dict.ConfigDict, *, mode: str = "train"
) -> None:
    """Checks a config without implied values left.

    Raises:
      ConfigError: the first thing found wrong, in one line.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode={mode}: expected one of {', '.join(MODES)}")
    _numbers(config)
    environment = _environment(config)
    _policy(config)
    algorithm = algorithm_of(config)
    _branching(config, algorithm, defaults.branching, environment.max_turns)
    _algorithm_settings(config, algorithm, defaults.algorithm)
    _critic(config, algorithm, defaults.loss)
    _sampling(config)
    if mode == "train":
        _training(config)
    if mode == "warmstart":
        _warmstart(config)
    _choices(config)
    check_mesh(config, mode)


def _fail(config: config_dict.ConfigDict, key: str, expected: str) -> None:
    value: Any = config
    for part in key.split("."):
        value = value[part]
    raise ConfigError(f"{key}={value!r}: {expected}")


def algorithm_of(config: config_dict.ConfigDict) -> estimators.Algorithm:
    """The algorithm that a config names.

    Raises:
      ConfigError: there is none of that name.
    """
    name = config.algorithm.name
    if name not in estimators.ALGORITHMS:
        known = ", ".join(sorted(estimators.ALGORITHMS))
        raise ConfigError(f"algorithm.name={name!r}: unknown algorithm, expected one of {known}")
    return estimators.ALGORITHMS[name]


_AT_LEAST: dict[str, float] = {
    "seed": 0, "cpu_devices": 1, "environment.max_turns": 1, "policy.context": 2,
    "algorithm.roots": 1, "branching.forks_per_root": 0, "branching.forks_per_tree": 0,
    "branching.siblings": 1, "branching.min_gap": 1, "branching.initial_threshold": 0,
    "rollout.action_tokens": 1, "rollout.slots": 1, "rollout.retries": 0,
    "rollout.kv_tokens": 1, "rollout.max_invalid": 1, "rollout.sandbox_threads": 1,
    "branching.min_gap_tokens": 0, "branching.probes": 2, "branching.probe_tokens": 1,
    "branching.oracle_rollouts": 2, "branching.initial_length": 1,
    "rollout.invalid_penalty": 0, "loss.kl_weight": 0,
    "loss.entropy_weight": 0, "loss.value_weight": 0, "loss.value_warmup": 0,
    "loss.chunk": 1, "optimizer.warmup": 0, "optimizer.weight_decay": 0,
    "optimizer.max_grad_norm": 0, "batch.tasks": 1, "batch.rows": 1, "batch.row_length": 128,
    "batch.minibatches": 1, "batch.epochs": 1, "budget.updates": 1, "budget.decoded_tokens": 1,
    "budget.returns": 1, "eval.tasks": 0, "eval.every": 0, "eval.step": 0, "eval.temperature": 0,
    "checkpoint.every": 1, "checkpoint.keep": 1, "batch.path_length": 1,
    "warmstart.updates": 1, "warmstart.stop": 1, "warmstart.rows": 1,
    "warmstart.row_length": 128, "warmstart.warmup": 0,
    "warmstart.observation_weight": 0, "warmstart.vocab_size": 260,
    "warmstart.tokenizer_chats": 1, "warmstart.checkpoint_every": 1, "export.step": 0,
    "log.gradient_directions": 0,
    "rollout.observation_tokens": 64,  # the dialogue's LEAST_OBSERVATION
}  # fmt: skip
_AT_MOST: dict[str, float] = {
    "seed": 2**32 - 1, "cpu_devices": 1024, "rollout.retries": 1000, "rollout.slots": 2**20,
    "rollout.kv_tokens": 2**40, "batch.tasks": 2**20, "batch.rows": 2**20,
    "batch.row_length": 2**24, "policy.context": 2**24, "batch.path_length": 2**24,
    "warmstart.rows": 2**20, "warmstart.row_length": 2**24, "warmstart.vocab_size": 2**24,
    "branching.probes": 2**10, "branching.oracle_rollouts": 2**10, "rollout.sandbox_threads": 2**12,
    "branching.siblings": 2**16, "algorithm.roots": 2**16, "checkpoint.keep": 2**20,
    "budget.decoded_tokens": 2**63 - 1, "budget.returns": 2**63 - 1,
}  # fmt: skip
_BELONGS = {
    "turns": ("placement", "fixed"), "initial_length": ("placement", "uniform"),
    "oracle_rollouts": ("placement", "oracle"), "probes": ("entropy", "probe"),
    "probe_tokens": ("entropy", "probe"), "markers": ("boundary", "marker"),
}  # fmt: skip
"""Settings of the branching that only one value of another one reads."""
_MOST_WHOLE, _MOST = 2**31 - 1, 1e30  # of all others: what 32 bits hold
_POSITIVE = (
    "loss.clip_low", "loss.clip_high", "loss.normalizer", "optimizer.learning_rate",
    "optimizer.eps", "algorithm.epsilon", "warmstart.learning_rate", "export.max_file_gib",
    "rollout.step_seconds", "rollout.max_seconds",
)  # fmt: skip
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "algorithm.gamma": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "algorithm.lam": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "algorithm.omega": (lambda x: x >= 0, "of 0 or more"),
    "algorithm.flow_exponent": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "branching.quantile": (lambda x: 0 < x < 1, "in (0, 1)"),
    "warmstart.mistakes": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "branching.memory": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "loss.clip_low": (lambda x: 0 < x < 1, "in (0, 1)"),
    "loss.importance_cap": (lambda x: x > 0, "greater than 0, or None for no correction"),
    "loss.value_clip": (lambda x: x > 0, "greater than 0, or None for no bound"),
    "loss.dual_clip": (lambda x: x > 1, "greater than 1, or None for no bound"),
    "optimizer.b1": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "optimizer.b2": (lambda x: 0 <= x < 1, "in [0, 1)"),
}


def _numbers(config: config_dict.ConfigDict) -> None:
    for section, entries in config.items():
        pairs = entries.items() if isinstance(entries, config_dict.ConfigDict) else [("", entries)]
        for name, value in pairs:
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            key = f"{section}.{name}".strip(".")
            if not math.isfinite(value):
                _fail(config, key, "expected a finite number")
            most = _AT_MOST.get(key, _MOST_WHOLE if isinstance(value, int) else _MOST)
            if abs(value) > most:
                _fail(config, key, f"expected {most} or less")

    def value_of(key: str) -> Any:
        section, _, name = key.partition(".")
        return config[section][name] if name else config[section]

    for key, least in _AT_LEAST.items():
        value = value_of(key)
        if value is not None and value < least:
            _fail(config, key, f"expected {least} or more")
    for key in _POSITIVE:
        value = value_of(key)
        if value is not None and value <= 0:
            _fail(config, key, "expected a number greater than 0")
    for key, (holds, text) in _RANGES.items():
        value = value_of(key)
        if value is not None and not holds(value):
            _fail(config, key, f"expected a number {text}")


def _environment(config: config_dict.ConfigDict) -> Any:
    factory = config.environment.factory
    module, colon, function = factory.partition(":")
    try:
        known = bool(colon and module and function) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        known = False
    if not known:
        _fail(
            config, "environment.factory",
            'expected "package.module:function" of an importable module',
        )  # fmt: skip
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever a module raises while it is imported
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"environment.factory={factory!r}: {module} cannot be imported: {reason}"
        ) from error
    if not callable(found):
        _fail(config, "environment.factory", f"{module} has no function {function!r}")
    data = config.environment.data
    if data is not None and not pathlib.Path(data).is_dir():
        _fail(
            config, "environment.data",
            "no such folder; give the folder of the downloaded data, or None for generated tasks",
        )  # fmt: skip
    try:
        environment = make_environment(config)
        if not callable(getattr(environment, "tasks", None)):
            _fail(
                config, "environment.factory",
                "expected a function that returns a bpo_jax.sandbox.api.Environment, not a "
                + type(environment).__name__,
            )  # fmt: skip
        if config.eval.tasks == 0 and config.eval.split == config.environment.train_split:
            _fail(config, "eval.tasks", f"all of the endless split {config.eval.split!r}; set some")
        for key in ("environment.train_split", "eval.split"):
            section, name = key.split(".")
            try:
                environment.tasks(config[section][name], seed=config.seed)
            except ValueError as error:
                _fail(config, key, str(error))
    except ConfigError:
        raise
    except Exception as error:  # whatever a factory raises
        raise ConfigError(f"environment: {' '.join(str(error).split())}") from error
    return environment


def make_environment(config: config_dict.ConfigDict) -> Any:
    """The environment of a config, a `bpo_jax.sandbox.api.Environment`.

    It must be cheap to make: tasks are read when they are asked for.
    """
    module, _, function = config.environment.factory.partition(":")
    settings = {
        "data": config.environment.data,
        "max_turns": config.environment.max_turns,
        "action_format": config.environment.action_format,
        **config.environment.settings.to_dict(),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return getattr(importlib.import_module(module), function)(**given)


def markers(config: config_dict.ConfigDict) -> tuple[str, ...]:
    """Texts inside a turn of the configured environment at whose end a turn may branch.

    Raises:
      ConfigError: the environment cannot be made.
    """
    return tuple(getattr(_environment(config), "markers", ()))


def _policy(config: config_dict.ConfigDict) -> None:
    init, tokenizer = config.policy.init, config.policy.tokenizer
    if tokenizer is not None and not (
        packaged.folder(tokenizer).is_dir() or packaged.is_hub_id(tokenizer)
    ):
        _fail(config, "policy.tokenizer", "no such folder")
    if init == "random":
        preset = config.policy.preset
        if preset not in PRESETS and not (packaged.folder(preset) / "config.json").is_file():
            _fail(
                config, "policy.preset",
                f"expected a folder with config.json, or one of {', '.join(PRESETS)}",
            )  # fmt: skip
    elif init.startswith(packaged.PREFIX):
        if init not in packaged.names():
            _fail(
                config, "policy.init",
                f"no such policy in the package, which has: {', '.join(packaged.names())}",
            )  # fmt: skip
    elif not packaged.is_hub_id(init) and not (pathlib.Path(init) / "config.json").is_file():
        _fail(
            config, "policy.init",
            "expected random, package:<name>, a folder with config.json and *.safetensors, or the "
            "hub id of such a model",
        )  # fmt: skip


def _branching(
    config: config_dict.ConfigDict,
    algorithm: estimators.Algorithm,
    defaults: config_dict.ConfigDict,
    max_turns: int,
) -> None:
    branching, roots, name = config.branching, config.algorithm.roots, algorithm.name
    allowed = algorithm.placements
    if branching.placement not in allowed:
        _fail(
            config, "branching.placement",
            f"algorithm.name={name!r} expects one of {', '.join(allowed)}",
        )  # fmt: skip
    if branching.placement == "none":
        never = f"algorithm.name={name!r} with placement 'none' never forks; leave it unset"
        if branching.forks_per_root > 0:
            _fail(config, "branching.forks_per_root", never)
        if branching.siblings > 1:
            _fail(config, "branching.siblings", never)
        for key in (key for key in defaults if key not in ("placement", "siblings")):
            if key != "forks_per_root" and branching[key] != defaults[key]:
                _fail(config, f"branching.{key}", never)
    for key, (other, value) in _BELONGS.items():
        if branching[other] != value and branching[key] != defaults[key]:
            _fail(
                config, f"branching.{key}",
                f"belongs to branching.{other}={value!r}, which is {branching[other]!r}",
            )  # fmt: skip
    if branching.placement == "post_hoc_ht":
        for key in ("forks_per_tree", "min_gap", "min_gap_tokens"):
            if branching[key] != defaults[key]:
                _fail(
                    config, f"branching.{key}",
                    "branching.placement='post_hoc_ht' draws every fork independently of the "
                    "others; leave it unset",
                )  # fmt: skip
    alone = roots == 1 and not config.algorithm.baseline
    if branching.placement != "none" and branching.siblings == 1:
        _fail(
            config, "branching.siblings",
            "a fork needs 2 or more children; for no forks set branching.placement='none'"
            + (f" (and algorithm.roots above 1, now {roots})" if alone else ""),
        )  # fmt: skip
    try:
        branching_lib.BranchingConfig(**branching.to_dict())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    turns = branching.turns or ()
    if not all(type(turn) is int and 0 < turn < max_turns for turn in turns):
        _fail(config, "branching.turns", f"expected turns from 1 to {max_turns - 1}")
    extra = branching.placement != "none" and (
        branching.placement == "oracle" or branching.entropy == "probe"
    )
    if extra and config.rollout.slots < 2 * config.cpu_devices:
        _fail(
            config, "rollout.slots",
            "what is tried out needs a slot of its own on every device; give at least 2 for each",
        )  # fmt: skip
    if not alone:
        return
    why = (
        f"algorithm.name={name!r} compares trajectories of one task, and with one root none would "
        "fork; expected "
    )
    instead = ", or algorithm.baseline=True" if "baseline" in algorithm.settings else ""
    if branching.placement == "none" or branching.forks_per_root == 0:
        _fail(config, "algorithm.roots", why + "2 or more" + instead)
    if branching.forks_per_tree == 0:
        _fail(config, "branching.forks_per_tree", why + "1 or more" + instead)
    if branching.min_gap >= max_turns:
        _fail(
            config, "branching.min_gap",
            f"{why}less than the {max_turns} turns of a trajectory{instead}",
        )  # fmt: skip


def _algorithm_settings(
    config: config_dict.ConfigDict,
    algorithm: estimators.Algorithm,
    defaults: config_dict.ConfigDict,
) -> None:
    for name in defaults:
        if name in ("name", "roots", "gamma"):
            continue
        if name not in algorithm.settings and config.algorithm[name] != defaults[name]:
            _fail(
                config, f"algorithm.{name}",
                f"algorithm.name={algorithm.name!r} has no such setting; leave it unset",
            )  # fmt: skip
    if config.algorithm.baseline and config.algorithm.roots > 1:
        _fail(
            config, "algorithm.baseline",
            f"algorithm.roots={config.algorithm.roots} are compared with each other; leave it "
            "unset, or set algorithm.roots=1",
        )  # fmt: skip


def _critic(
    config: config_dict.ConfigDict,
    algorithm: estimators.Algorithm,
    defaults: config_dict.ConfigDict,
) -> None:
    if algorithm.critic:
        if config.loss.value_weight == 0:
            _fail(
                config, "loss.value_weight",
                f"algorithm.name={algorithm.name!r} learns values; expected more than 0",
            )  # fmt: skip
        return
    never = f"algorithm.name={algorithm.name!r} has no critic; leave it unset"
    if config.loss.value_weight > 0:
        _fail(config, "loss.value_weight", never)
    for name in ("value_clip", "value_warmup", "value_trunk"):
        if config.loss[name] != defaults[name]:
            _fail(config, f"loss.{name}", never)


def _sampling(config: config_dict.ConfigDict) -> None:
    if config.rollout.temperature <= 0:
        _fail(
            config, "rollout.temperature",
            "training samples, so expected a number greater than 0 (eval.temperature may be 0)",
        )  # fmt: skip
    if config.profile.steps is not None:
        try:
            profiling.parse_steps(config.profile.steps)
        except ValueError as error:
            _fail(config, "profile.steps", str(error))
    tokens = config.rollout.kv_tokens
    if tokens is not None and tokens < config.policy.context + 32:
        _fail(
            config, "rollout.kv_tokens",
            f"one branch of policy.context={config.policy.context} tokens has to fit; give at "
            f"least {config.policy.context + 32}, or None",
        )  # fmt: skip
    if config.rollout.observation_tokens is not None and config.rollout.overflow != "clip":
        _fail(
            config, "rollout.observation_tokens",
            "only rollout.overflow='clip' shortens observations; set that, or leave this unset",
        )  # fmt: skip
    try:
        datetime.date.fromisoformat(config.rollout.date)
    except ValueError:
        _fail(config, "rollout.date", "expected a date, such as 2024-07-26")
    if config.policy.context <= config.rollout.action_tokens:
        _fail(
            config, "policy.context",
            "leaves no room for a prompt beside rollout.action_tokens="
            f"{config.rollout.action_tokens}",
        )  # fmt: skip


def _warmstart(config: config_dict.ConfigDict) -> None:
    settings = config.warmstart
    if settings.data is not None and not pathlib.Path(settings.data).is_file():
        _fail(config, "warmstart.data", "no such file; give one of chats, or None for the expert")
    if settings.row_length % 128:
        _fail(config, "warmstart.row_length", "expected a multiple of 128")


def _training(config: config_dict.ConfigDict) -> None:
    batch, budget = config.batch, config.budget
    if budget.updates is None and budget.decoded_tokens is None and budget.returns is None:
        raise ConfigError(
            "budget: nothing is set, so the run would never end; set budget.updates, "
            "budget.decoded_tokens or budget.returns"
        )
    if batch.tasks % batch.minibatches:
        _fail(config, "batch.minibatches", f"expected a divisor of batch.tasks={batch.tasks}")
    if batch.row_length % 128:
        _fail(config, "batch.row_length", "expected a multiple of 128")
    if batch.row_length < config.policy.context:
        _fail(
            config, "batch.row_length",
            f"a branch of policy.context={config.policy.context} tokens must fit a row",
        )  # fmt: skip
    if not config.policy.context <= batch.path_length <= batch.row_length:
        _fail(
            config, "batch.path_length",
            f"expected at least policy.context={config.policy.context}, since nothing is cut from "
            f"a branch, and at most batch.row_length={batch.row_length}",
        )  # fmt: skip
    if not all(
        type(bucket) is int and 0 < bucket <= batch.row_length and bucket % 128 == 0
        for bucket in batch.row_buckets
    ):
        _fail(
            config, "batch.row_buckets",
            f"expected multiples of 128 up to batch.row_length={batch.row_length}",
        )  # fmt: skip
    if config.optimizer.schedule == "cosine" and budget.updates is None:
        _fail(config, "optimizer.schedule", "the cosine needs an end: set budget.updates")


def _cpu_only() -> bool:
    """Whether JAX will find nothing but a CPU, as far as one can tell without importing it."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    return all(importlib.util.find_spec(name) is None for name in ("jax_plugins", "libtpu"))


def check_mesh(config: config_dict.ConfigDict, mode: str, devices: int | None = None) -> None:
    """Checks the sizes of the mesh and that the rows of a batch divide over it.

    Args:
      config: resolved or not.
      mode: decides whose rows are spread.
      devices: how many there are; None before JAX has been asked, where only a CPU's are known.

    Raises:
      ConfigError: a size that no mesh has, sizes that do not multiply to the number of devices, or
        rows that do not divide.
    """
    sizes = config.mesh.to_dict()
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            _fail(config, f"mesh.{axis}", "expected a number of devices, or -1 for those left")
    text = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    left = [axis for axis, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise ConfigError(f"{text}: only one size may be -1, the devices that are left")
    if devices is None and _cpu_only():
        devices = config.cpu_devices
    if devices is not None:
        given = math.prod(size for size in sizes.values() if size != -1)
        if left and devices % given == 0:
            sizes[left[0]] = devices // given
        elif left or given != devices:
            raise ConfigError(
                f"{text}: expected sizes that multiply to the number of devices, {devices}; change "
                "them, or cpu_devices where there is only a CPU"
            )
    ways = sizes["data"] * sizes["fsdp"]
    key = {"train": "batch.rows", "warmstart": "warmstart.rows"}.get(mode)
    if key and ways > 1:
        section, _, name = key.partition(".")
        if config[section][name] % ways:
            _fail(config, key, f"expected a multiple of mesh.data x mesh.fsdp = {ways}")


def _choices(config: config_dict.ConfigDict) -> None:
    for key, allowed in {
        "policy.dtype": ("float32", "bfloat16"),
        "policy.param_dtype": ("float32", "bfloat16"),
        "policy.remat": ("none", "dots", "full"),
        "export.dtype": (None, "float32", "bfloat16"),
        "algorithm.propagate": (None, *bpo_paper.PROPAGATE),
        "loss.ratio": ("token", "action"),
        "rollout.overflow": ("end", "clip"),
        "loss.kl_estimator": ("k1", "k2", "k3"),
        "optimizer.schedule": ("constant", "cosine"),
    }.items():
        section, name = key.split(".")
        if config[section][name] not in allowed:
            _fail(config, key, f"expected one of {', '.join(filter(None, allowed))}")
