"""The configuration of a run: every key with its default, and the checks that refuse a bad one.

A config file's ``get_config`` starts from `base()` and changes what its task needs. ``None`` stands
for "implied": by the algorithm (roots, branching) or by another key; `resolve` fills it in and
checks everything, before JAX is imported and before anything is computed.
"""

from __future__ import annotations

import copy
from typing import Any

from ml_collections import config_dict

from bpo_jax import config_checks as checks
from bpo_jax.config_checks import ConfigError as ConfigError
from bpo_jax.config_checks import check_mesh as check_mesh
from bpo_jax.config_checks import make_environment as make_environment

MODES = checks.MODES
FLAT_ROOTS = 10
FORKING_ROOTS, FORKS_PER_ROOT, SIBLINGS = 2, 2, 3
"""10 returns a task either way: 2 roots, and 2 forks below each with 2 fresh siblings."""

COMMON = {"algorithm.gamma": 1.0, "loss.kl_weight": 0.0, "loss.value_weight": 0.0}
"""What is implied by an algorithm that does not say."""


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
    # How an action stands in a turn, a name in bpo_jax/action_formats.py: the environment's, since
    # its prompt explains it and its experts write it. None: its own.
    environment.action_format = optional(str)
    environment.train_split = "train"  # endless, seeded
    # Other arguments of the factory, here those of the household games; None: its own default.
    environment.settings = settings = config_dict.ConfigDict()
    settings.size = optional(str)  # of generated games
    settings.kinds = optional(tuple)  # of tasks
    settings.held_out = optional(int)  # generated games in each evaluation split
    settings.protocol = optional(str)  # how game and policy talk
    settings.expert_idleness = optional(float)  # probability that a demonstrated command is idle

    config.policy = policy = config_dict.ConfigDict()
    # Where the parameters come from: "random", "package:<name>" (shipped with bpo_jax), a folder in
    # Hugging Face's format, or the hub id of one, "owner/model".
    policy.init = "random"
    # Sizes of a random policy: a name in bpo_jax/models/presets.py, or a folder with config.json.
    policy.preset = "tiny"
    policy.tokenizer = optional(str)  # folder or hub id; None: the one with the parameters
    policy.context = 768  # longest branch in tokens, prompt included
    policy.dtype = "float32"  # of activations: float32 | bfloat16
    policy.param_dtype = "float32"  # of parameters and optimiser state
    policy.remat = "none"  # recompute in the backward pass: none | dots | full

    config.algorithm = algorithm = config_dict.ConfigDict()
    algorithm.name = "bpo"  # a name in bpo_jax/estimators
    algorithm.roots = optional(int)  # M trajectories from the start of a task; None: implied
    # Discount per action. None: implied by the algorithm, 1 for most.
    algorithm.gamma = optional(float)
    algorithm.flow_exponent = 1.0  # bpo: 1 is the policy gradient, 0 counts every action equally
    algorithm.shrinkage = False  # bpo: shrink fork baselines with statistics of earlier updates
    # bpo and post_hoc_ht with one root: compare it with the mean return of earlier updates instead
    # of with 0.
    algorithm.baseline = False
    # rloo: average the returns of the others over actions, not trajectories: biased, as some public
    # baselines are, and for comparison with them only.
    algorithm.row_per_step = False
    algorithm.epsilon = 1e-6  # grpo: added to the standard deviation
    # ppo: weight of later steps in an advantage; bpo_paper: fading of the copies that go up to what
    # siblings share. None: 0.95 both.
    algorithm.lam = optional(float)
    # bpo_paper: whose advantage is copied, "backbone" | "siblings". None: the backbone's.
    algorithm.propagate = optional(str)
    algorithm.omega = optional(float)  # gigpo: weight of the step advantage; None: 1

    config.branching = branching = config_dict.ConfigDict()
    # Where to fork. Decided before anything is sampled there: "threshold" (entropy above a running
    # quantile), "random" (as often), "fixed" (at branching.turns), "uniform" (evenly over the
    # expected length), "oracle" (where the returns of rollouts spread; for study), "none". When a
    # trajectory has ended: "post_hoc_top_m" (greatest entropy), "post_hoc_ht" (drawn by entropy).
    branching.placement = optional(str)  # None: implied by the algorithm
    branching.siblings = optional(int)  # K, children of a fork, the first included; None: implied
    branching.forks_per_root = optional(int)  # at most, below each root; None: implied
    branching.forks_per_tree = optional(int)  # at most, in one tree; None: forks_per_root alone
    branching.min_gap = 2  # turns from the start or a fork to the next fork on a path, at least
    branching.min_gap_tokens = 0  # the same in tokens
    branching.nested = False  # every sibling may fork again; otherwise only the first
    branching.quantile = 0.7  # of the entropies of earlier updates, the threshold
    branching.initial_threshold = 0.5  # nats, for the first update
    branching.memory = 0.8  # weight of the past in the running threshold and length
    branching.turns = optional(tuple)  # of "fixed": where to fork, counted from 0
    branching.initial_length = 10.0  # turns that "uniform" expects, for the first update
    branching.boundary = "turn"  # fork before a turn, or behind its first "marker"
    # Texts that end a turn's thought and begin its action; None: those of the action format.
    branching.markers = optional(tuple)
    # What "threshold" looks at: the entropy of the "first_token" (post-hoc placements, too), or of
    # a "probe": short continuations that are thrown away.
    branching.entropy = "first_token"
    branching.probes = 8  # continuations of a probe
    branching.probe_tokens = 16  # longest of them
    branching.oracle_rollouts = 4  # of "oracle", at every candidate

    config.rollout = rollout = config_dict.ConfigDict()
    rollout.temperature = 1.0  # of sampling, and of all log-probs in the loss
    rollout.action_tokens = 24  # longest action
    rollout.slots = 64  # branches sampled at the same time, by all of this process's devices
    # Tokens whose keys and values are kept, on each device. Where they do not suffice, the newest
    # branches are computed again later. None: enough for every slot's whole context.
    rollout.kv_tokens = optional(int)
    rollout.retries = 2  # times a broken sandbox is rebuilt for an action before it is masked
    rollout.step_seconds = optional(float)  # a sandbox call that takes longer has failed
    rollout.max_seconds = optional(float)  # of a trajectory's turns; the one that passes it is last
    rollout.max_invalid = optional(int)  # turns without a valid action, in a row, that end it
    rollout.sandbox_threads = 32  # sandboxes that work at a time, where they are not in-process
    # Take up what sandboxes have done in a fixed order, so that a run can be repeated to the last
    # bit. False: whatever is finished goes on at once, and no branch waits for a slow sandbox.
    rollout.deterministic = True
    # Leave out trees whose returns are all equal. They have no gradient with a group baseline, but
    # leaving them out of the mean over tasks weighs the others by the outcome: biased.
    rollout.filter = False
    rollout.invalid_penalty = 0.0  # taken from the reward of a turn without a valid action
    # Where an observation leaves no room for a full turn: "end" ends the trajectory as truncated,
    # "clip" leaves out the middle of the observation.
    rollout.overflow = "end"
    # Tokens beyond which "clip" leaves out the middle of any observation, 64 or more; None: none.
    rollout.observation_tokens = optional(int)
    # For chat templates that can switch thoughts on and off (Qwen3); None: their own default.
    rollout.thinking = optional(bool)
    # For chat templates that tell the date (Llama 3.1): the same on every day of a run.
    rollout.date = "2024-07-26"
    rollout.check_dialogue = False  # render the whole of every trajectory again and compare

    config.loss = loss = config_dict.ConfigDict()
    loss.clip_low = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    loss.clip_high = 0.2  # see above
    loss.dual_clip = optional(float)  # bound for negative advantages, > 1; None: none
    # Of the KL to the reference policy (the initial one). None: implied, 0 for most algorithms.
    loss.kl_weight = optional(float)
    loss.kl_estimator = "k2"  # k1 | k2 | k3
    loss.entropy_weight = 0.0  # of the entropy bonus
    # "token", or "action": one ratio an action, the geometric mean of its tokens' (as GSPO's).
    loss.ratio = "token"
    # Most that the gap between the sampler's and the learner's log-probs may weigh a token or an
    # action (truncated importance sampling); None: the gap stays in the ratio.
    loss.importance_cap = optional(float)
    # ppo: weight of the critic's loss. None: implied, 0.5, and 0 without a critic.
    loss.value_weight = optional(float)
    loss.value_clip = optional(float)  # ppo: how far a value may move in an update; None: any
    loss.value_warmup = 0  # ppo: updates in which the critic alone is trained
    loss.value_trunk = False  # ppo: the critic's loss changes the whole model, not its head alone
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
    batch.row_length = 2048  # most tokens of a row, a multiple of 128
    # Shorter rows that a micro-batch may have instead, multiples of 128. Each is one more shape to
    # compile; () for none. None: 1/2, 3/4 and 7/8 of row_length.
    batch.row_buckets = optional(tuple)
    # Most tokens of one path of a tree; a longer one is refused, never cut. None: policy.context.
    batch.path_length = optional(int)
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

    # --mode=export: the newest checkpoint, or the initial policy, as a folder for other programs.
    config.export = export = config_dict.ConfigDict()
    export.path = optional(str)  # None: WORKDIR/export
    export.step = optional(int)  # the checkpoint of this update; None: the newest
    export.dtype = optional(str)  # of the tensors: bfloat16 | float32; None: policy.param_dtype
    export.max_file_gib = 5.0  # a larger model is split into several files, with an index

    config.mesh = mesh = config_dict.ConfigDict()
    mesh.data = 1  # replicas of the model
    mesh.fsdp = -1  # ways parameters are sharded; -1: the devices that are left
    mesh.tensor = 1  # ways heads and the vocabulary are split

    config.profile = profile = config_dict.ConfigDict()
    # "a:b" writes a profiler trace of the updates a to b - 1 to WORKDIR/profile.
    profile.steps = optional(str)

    config.log = log = config_dict.ConfigDict()
    log.tensorboard = True  # event files in the workdir
    # Random directions in which the gradient's variance is measured at every forked turn, with and
    # without forks. Each costs two scoring passes over an update's trees; 16 give a rough number.
    log.gradient_directions = 0
    return config


def check_shape(config: Any) -> None:
    """Checks that `config` has the keys of `base()`, with values of their types.

    Raises:
      ConfigError: it has not.
    """
    checks.check_shape(config, base())


def resolve(config: config_dict.ConfigDict, *, mode: str = "train") -> config_dict.ConfigDict:
    """A copy with implied values filled in, checked and locked.

    Args:
      config: `base()` with changes.
      mode: what it is for.

    Raises:
      ConfigError: the first thing found wrong, in one line.
    """
    check_shape(config)
    config = config_dict.ConfigDict(copy.deepcopy(config.to_dict()))
    algorithm = checks.algorithm_of(config)
    implied = dict(algorithm.implies) | {
        f"algorithm.{name}": value
        for name, value in algorithm.settings.items()
        if name in config.algorithm
    }
    for key, value in (COMMON | implied).items():
        section, _, name = key.partition(".")
        if config[section][name] is None:
            config[section][name] = value
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
    if branching.boundary == "marker" and branching.markers is None:
        branching.markers = checks.markers(config)
    if config.batch.row_buckets is None:
        config.batch.row_buckets = row_buckets(config.batch.row_length)
    if config.batch.path_length is None:
        config.batch.path_length = config.policy.context
    checks.validate(config, base(), mode=mode)
    config.lock()
    return config


def row_buckets(row_length: int) -> tuple[int, ...]:
    """1/2, 3/4 and 7/8 of `row_length`, rounded up to multiples of 128, those that are shorter.

    Most trees are longer than half a row, or are cut into parts that are, so it is near the whole
    that a finer choice saves the most.
    """
    eighths = {-(-row_length * part // 1024) * 128 for part in (4, 6, 7)}
    return tuple(sorted(bucket for bucket in eighths if 0 < bucket < row_length))
