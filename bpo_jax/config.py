"""The configuration of a run: every key with its default, and the checks that refuse a bad one.

A config file's ``get_config`` starts from `base()` and changes what its task needs. ``None`` stands
for "implied": by the algorithm (roots, branching) or by another key; `resolve` fills it in and
checks everything, before JAX is imported and before anything is computed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import numbers
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import config_dict

from bpo_jax import estimators

MODES = ("train", "eval", "warmstart")
PLACEMENTS = ("threshold", "random", "none")
FLAT_ROOTS = 10
FORKING_ROOTS, FORKS_PER_ROOT, SIBLINGS = 2, 2, 3
"""10 returns a task either way: 2 roots, and 2 forks below each with 2 fresh siblings."""


class ConfigError(ValueError):
    """A configuration that cannot work.

    The message is one line: the key, its value, what was expected, what to do.
    """


def base() -> config_dict.ConfigDict:
    """Every key of a run with its default value."""
    optional = config_dict.placeholder
    config = config_dict.ConfigDict()
    config.seed = 0  # everything random derives from it
    # Devices a CPU counts as. XLA runs small operations on one core: two devices use two cores.
    config.cpu_devices = 1

    config.environment = environment = config_dict.ConfigDict()
    # "package.module:function" that makes the environment (see bpo_jax.sandbox.api.Environment).
    environment.factory = "bpo_jax.environments.alfworld:make"
    environment.data = optional(str)  # folder of official data; None: generated tasks
    environment.max_turns = optional(int)  # actions before a trajectory is cut; None: its own
    environment.train_split = "train"  # endless, seeded
    # Other arguments of the factory, here those of the household games; None: its own default.
    environment.settings = settings = config_dict.ConfigDict()
    settings.size = optional(str)  # of generated games
    settings.kinds = optional(tuple)  # of tasks
    settings.held_out = optional(int)  # generated games in each evaluation split
    settings.protocol = optional(str)  # how game and policy talk

    config.policy = policy = config_dict.ConfigDict()
    # Where the parameters come from: "random", "package:<name>" (shipped with bpo_jax), or a folder
    # in Hugging Face's format.
    policy.init = "random"
    # Sizes of a random policy: a name in bpo_jax/models/presets.py, or a folder with config.json.
    policy.preset = "tiny"
    policy.tokenizer = optional(str)  # folder; None: the one that lies with the parameters
    policy.context = 768  # longest branch in tokens, prompt included
    policy.dtype = "float32"  # of activations: float32 | bfloat16
    policy.param_dtype = "float32"  # of parameters and optimiser state
    policy.remat = "none"  # recompute in the backward pass: none | dots | full

    config.algorithm = algorithm = config_dict.ConfigDict()
    algorithm.name = "bpo"  # a name in bpo_jax/estimators
    algorithm.roots = optional(int)  # M trajectories from the start of a task; None: implied
    algorithm.gamma = 1.0  # discount per action
    algorithm.flow_exponent = 1.0  # bpo: 1 is the policy gradient, 0 counts every action equally
    algorithm.shrinkage = False  # bpo: shrink fork baselines with statistics of earlier updates
    algorithm.epsilon = 1e-6  # grpo: added to the standard deviation

    config.branching = branching = config_dict.ConfigDict()
    # Where to fork: "threshold" (entropy above a running quantile), "random" (as often), "none".
    branching.placement = optional(str)  # None: implied by the algorithm
    branching.siblings = optional(int)  # K, children of a fork, the first included; None: implied
    branching.forks_per_root = optional(int)  # at most, below each root; None: implied
    branching.forks_per_tree = optional(int)  # at most, in one tree; None: forks_per_root alone
    branching.min_gap = 2  # turns from the start or a fork to the next fork on a path, at least
    branching.nested = False  # every sibling may fork again; otherwise only the first
    branching.quantile = 0.7  # of the entropies of earlier updates, the threshold
    branching.initial_threshold = 0.5  # nats, for the first update
    branching.memory = 0.8  # weight of the past in the running threshold

    config.rollout = rollout = config_dict.ConfigDict()
    rollout.temperature = 1.0  # of sampling, and of all log-probs in the loss
    rollout.action_tokens = 24  # longest action
    rollout.slots = 64  # branches sampled at the same time, by all of this process's devices
    rollout.retries = 2  # times a broken sandbox is rebuilt for an action before it is masked
    rollout.invalid_penalty = 0.0  # taken from the reward of a turn without a valid action

    config.loss = loss = config_dict.ConfigDict()
    loss.clip_low = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    loss.clip_high = 0.2  # see above
    loss.dual_clip = optional(float)  # bound for negative advantages, > 1; None: none
    loss.kl_weight = 0.0  # of the KL to the reference policy (the initial one)
    loss.kl_estimator = "k2"  # k1 | k2 | k3
    loss.entropy_weight = 0.0  # of the entropy bonus
    loss.normalizer = 100.0  # C; a constant near the number of sampled tokens in a trajectory
    loss.chunk = 1024  # tokens whose logits exist at the same time

    config.optimizer = optimizer = config_dict.ConfigDict()
    optimizer.learning_rate = 3e-4  # the peak
    optimizer.warmup = 5  # updates
    optimizer.schedule = "constant"  # constant | cosine (over budget.updates)
    optimizer.b1 = 0.9  # AdamW's
    optimizer.b2 = 0.95  # AdamW's
    optimizer.eps = 1e-8  # AdamW's
    optimizer.weight_decay = 0.0  # of matrices
    optimizer.max_grad_norm = 1.0  # 0: no clipping

    config.batch = batch = config_dict.ConfigDict()
    batch.tasks = 8  # P, tasks an update
    batch.rows = 2  # rows of a micro-batch
    batch.row_length = 2048  # tokens of a row, a multiple of 128
    batch.minibatches = 1  # optimiser steps an epoch; divides tasks
    batch.epochs = 1  # passes over an update's trees

    # Whichever is set and reached first ends the run.
    config.budget = budget = config_dict.ConfigDict()
    budget.updates = optional(int)  # optimiser updates
    budget.decoded_tokens = optional(int)  # sampled in training, each once
    budget.returns = optional(int)  # trajectories that ended with a return

    config.eval = evaluation = config_dict.ConfigDict()
    evaluation.split = "valid"  # finite, in a fixed order
    evaluation.tasks = 200  # the first so many of the split; 0: all
    # In --mode=eval: the checkpoint of this update; None: the newest, or the initial policy.
    evaluation.step = optional(int)
    evaluation.every = 0  # updates between evaluations; 0: at the start and at the end only
    evaluation.temperature = 0.4  # 0: greedy

    config.warmstart = warmstart = config_dict.ConfigDict()
    # File of chats to clone, one {"messages": [...]} a line; None: the environment's expert.
    warmstart.data = optional(str)
    # Probability of a refused command before each of the expert's; read, not learned.
    warmstart.mistakes = 0.15
    warmstart.updates = 6000  # optimiser updates, at whose end the learning rate is lowest
    warmstart.stop = optional(int)  # stop after so many of them: leaves reinforcement more to do
    warmstart.rows = 4  # rows of a batch
    warmstart.row_length = 512  # tokens of a row; longer demonstrations are left out
    warmstart.learning_rate = 4e-3  # the peak; AdamW, cosine down to a twentieth
    warmstart.warmup = 50  # updates
    warmstart.observation_weight = 0.3  # of tokens the policy only reads, beside 1 for actions
    warmstart.vocab_size = 1024  # most ids of a tokenizer made for a random policy without one
    warmstart.tokenizer_chats = 3000  # demonstrations that tokenizer is made from
    warmstart.checkpoint_every = 500  # updates

    config.checkpoint = checkpoint = config_dict.ConfigDict()
    checkpoint.every = 10  # updates; one is always written at the end and on Ctrl-C
    checkpoint.keep = 2  # the newest

    config.mesh = mesh = config_dict.ConfigDict()
    mesh.data = 1  # replicas of the model
    mesh.fsdp = -1  # ways parameters are sharded; -1: the devices that are left
    mesh.tensor = 1  # ways heads and the vocabulary are split

    config.log = log = config_dict.ConfigDict()
    log.tensorboard = True  # event files in the workdir
    return config


def resolve(config: config_dict.ConfigDict, *, mode: str = "train") -> config_dict.ConfigDict:
    """A copy with implied values filled in, checked and locked.

    Args:
      config: `base()` with changes.
      mode: what it is for.

    Raises:
      ConfigError: see `validate`.
    """
    config = config_dict.ConfigDict(copy.deepcopy(config.to_dict()))
    algorithm = _algorithm(config)
    branching = config.branching
    if branching.placement is None:
        branching.placement = algorithm.placements[0]
    flat = branching.placement == "none"
    if config.algorithm.roots is None:
        config.algorithm.roots = FLAT_ROOTS if flat else FORKING_ROOTS
    if branching.forks_per_root is None:
        branching.forks_per_root = 0 if flat else FORKS_PER_ROOT
    if branching.siblings is None:
        branching.siblings = 1 if flat else SIBLINGS
    validate(config, mode=mode)
    config.lock()
    return config


def validate(config: config_dict.ConfigDict, *, mode: str = "train") -> None:
    """Checks a config without implied values left.

    Raises:
      ConfigError: the first thing found wrong, in one line.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode={mode}: expected one of {', '.join(MODES)}")
    _numbers(config)
    _environment(config)
    _policy(config)
    algorithm = _algorithm(config)
    _branching(config, algorithm)
    _algorithm_settings(config, algorithm)
    if mode == "train":
        _training(config)
    _choices(config)


def _fail(config: config_dict.ConfigDict, key: str, expected: str) -> None:
    value: Any = config
    for part in key.split("."):
        value = value[part]
    raise ConfigError(f"{key}={value!r}: {expected}")


def _algorithm(config: config_dict.ConfigDict) -> estimators.Algorithm:
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
    "rollout.invalid_penalty": 0, "loss.kl_weight": 0,
    "loss.entropy_weight": 0, "loss.chunk": 1, "optimizer.warmup": 0, "optimizer.weight_decay": 0,
    "optimizer.max_grad_norm": 0, "batch.tasks": 1, "batch.rows": 1, "batch.row_length": 128,
    "batch.minibatches": 1, "batch.epochs": 1, "budget.updates": 1, "budget.decoded_tokens": 1,
    "budget.returns": 1, "eval.tasks": 0, "eval.every": 0, "eval.step": 0, "eval.temperature": 0,
    "checkpoint.every": 1, "checkpoint.keep": 1,
    "warmstart.updates": 1, "warmstart.stop": 1, "warmstart.rows": 1,
    "warmstart.row_length": 128, "warmstart.warmup": 0,
    "warmstart.observation_weight": 0, "warmstart.vocab_size": 260,
    "warmstart.tokenizer_chats": 1, "warmstart.checkpoint_every": 1,
}  # fmt: skip
_POSITIVE = (
    "loss.clip_low", "loss.clip_high", "loss.normalizer", "optimizer.learning_rate",
    "optimizer.eps", "algorithm.epsilon", "warmstart.learning_rate",
)  # fmt: skip
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "algorithm.gamma": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "algorithm.flow_exponent": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "branching.quantile": (lambda x: 0 < x < 1, "in (0, 1)"),
    "warmstart.mistakes": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "branching.memory": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "loss.clip_low": (lambda x: 0 < x < 1, "in (0, 1)"),
    "loss.dual_clip": (lambda x: x > 1, "greater than 1, or None for no bound"),
    "optimizer.b1": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "optimizer.b2": (lambda x: 0 <= x < 1, "in [0, 1)"),
}


def _numbers(config: config_dict.ConfigDict) -> None:
    for section, entries in config.items():
        pairs = entries.items() if isinstance(entries, config_dict.ConfigDict) else [("", entries)]
        for name, value in pairs:
            if isinstance(value, numbers.Real) and not math.isfinite(value):
                _fail(config, f"{section}.{name}".strip("."), "expected a finite number")

    def value_of(key: str) -> Any:
        section, _, name = key.partition(".")
        return config[section][name] if name else config[section]

    for key, least in _AT_LEAST.items():
        value = value_of(key)
        if value is not None and value < least:
            _fail(config, key, f"expected {least} or more")
    for key in _POSITIVE:
        if value_of(key) <= 0:
            _fail(config, key, "expected a number greater than 0")
    for key, (holds, text) in _RANGES.items():
        value = value_of(key)
        if value is not None and not holds(value):
            _fail(config, key, f"expected a number {text}")


def _environment(config: config_dict.ConfigDict) -> None:
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
    data = config.environment.data
    if data is not None and not pathlib.Path(data).is_dir():
        _fail(
            config, "environment.data",
            "no such folder; give the folder of the downloaded data, or None for generated tasks",
        )  # fmt: skip
    try:
        environment = make_environment(config)
        for key in ("environment.train_split", "eval.split"):
            section, name = key.split(".")
            try:
                environment.tasks(config[section][name], seed=config.seed)
            except ValueError as error:
                _fail(config, key, str(error))
    except ConfigError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"environment: {' '.join(str(error).split())}") from error


def make_environment(config: config_dict.ConfigDict) -> Any:
    """The environment of a config, a `bpo_jax.sandbox.api.Environment`.

    It must be cheap to make: tasks are read when they are asked for.
    """
    module, _, function = config.environment.factory.partition(":")
    settings = {
        "data": config.environment.data,
        "max_turns": config.environment.max_turns,
        **config.environment.settings.to_dict(),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return getattr(importlib.import_module(module), function)(**given)


def _policy(config: config_dict.ConfigDict) -> None:
    init, tokenizer = config.policy.init, config.policy.tokenizer
    if tokenizer is not None and not pathlib.Path(tokenizer).is_dir():
        _fail(config, "policy.tokenizer", "no such folder")
    if init == "random":
        return
    if init.startswith("package:"):
        folder = package_folder(init)
        if not (folder / "model.safetensors").is_file():
            have = sorted(p.parent.name for p in folder.parent.glob("*/model.safetensors"))
            _fail(
                config, "policy.init",
                f"no such policy in the package, which has: {', '.join(have) or 'none'}",
            )  # fmt: skip
    elif not (pathlib.Path(init) / "config.json").is_file():
        _fail(
            config, "policy.init",
            "expected random, package:<name>, or a folder with config.json and *.safetensors",
        )  # fmt: skip


def package_folder(init: str) -> pathlib.Path:
    """The folder of a policy that is shipped with the package, of "package:<name>"."""
    return pathlib.Path(__file__).parent / "assets" / init.removeprefix("package:")


def _branching(config: config_dict.ConfigDict, algorithm: estimators.Algorithm) -> None:
    branching, roots, name = config.branching, config.algorithm.roots, algorithm.name
    allowed = [p for p in algorithm.placements if p in PLACEMENTS]
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
    elif branching.siblings == 1 and (roots > 1 or branching.forks_per_root > 0):
        _fail(
            config, "branching.siblings",
            "a fork needs 2 or more children; for no forks set branching.placement='none'"
            + (f" (and algorithm.roots above 1, now {roots})" if roots == 1 else ""),
        )  # fmt: skip
    forks = branching.placement != "none" and branching.forks_per_root > 0
    if roots == 1 and (not forks or branching.siblings == 1):
        _fail(
            config, "algorithm.roots",
            f"algorithm.name={name!r} compares trajectories of one task, and here one alone would "
            "start and none would fork; expected 2 or more",
        )  # fmt: skip


def _algorithm_settings(config: config_dict.ConfigDict, algorithm: estimators.Algorithm) -> None:
    defaults = base().algorithm
    for name in ("flow_exponent", "shrinkage", "epsilon"):
        if name not in algorithm.settings and config.algorithm[name] != defaults[name]:
            _fail(
                config, f"algorithm.{name}",
                f"algorithm.name={algorithm.name!r} has no such setting; leave it unset",
            )  # fmt: skip


def _training(config: config_dict.ConfigDict) -> None:
    rollout, batch, budget = config.rollout, config.batch, config.budget
    if rollout.temperature <= 0:
        _fail(
            config, "rollout.temperature",
            "training samples, so expected a number greater than 0 (eval.temperature may be 0)",
        )  # fmt: skip
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
    if config.policy.context <= rollout.action_tokens:
        _fail(
            config, "policy.context",
            f"leaves no room for a prompt beside rollout.action_tokens={rollout.action_tokens}",
        )  # fmt: skip
    if config.optimizer.schedule == "cosine" and budget.updates is None:
        _fail(config, "optimizer.schedule", "the cosine needs an end: set budget.updates")
    for axis, size in config.mesh.items():
        if size < 1 and size != -1:
            _fail(config, f"mesh.{axis}", "expected a number of devices, or -1 for those left")
    slots = config.mesh.data * config.mesh.fsdp
    if slots > 1 and batch.rows % slots:
        _fail(config, "batch.rows", f"expected a multiple of mesh.data x mesh.fsdp = {slots}")


def _choices(config: config_dict.ConfigDict) -> None:
    for key, allowed in {
        "policy.dtype": ("float32", "bfloat16"),
        "policy.param_dtype": ("float32", "bfloat16"),
        "policy.remat": ("none", "dots", "full"),
        "loss.kl_estimator": ("k1", "k2", "k3"),
        "optimizer.schedule": ("constant", "cosine"),
    }.items():
        section, name = key.split(".")
        if config[section][name] not in allowed:
            _fail(config, key, f"expected one of {', '.join(allowed)}")
