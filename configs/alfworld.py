"""ALFWorld's official games, with the small policy or a real one.

    export ALFWORLD_DATA=/path/to/alfworld      # the folder that holds json_2.1.1/
    python -m bpo_jax.main --config=configs/alfworld.py --workdir=runs/alfworld
    python -m bpo_jax.main --config=configs/alfworld.py:qwen2.5-7b --workdir=runs/alfworld-7b \\
        --config.policy.init=/path/to/Qwen2.5-7B-Instruct

Needs: the game files, fetched by `pip install alfworld && alfworld-download`, named by
$ALFWORLD_DATA or by --config.environment.data=DIR. The argument chooses the policy: "tiny" (the
default) is the one of the quickstart, cloned on generated games; "qwen2.5-7b" wants a folder with
the released parameters in policy.init and accelerators to hold them.
"""

import os

from ml_collections import config_dict

from bpo_jax import config as config_lib

POLICIES = ("tiny", "qwen2.5-7b")


def get_config(arg: str = "tiny") -> config_dict.ConfigDict:
    """The configuration for a policy, one of `POLICIES`."""
    policy = arg or "tiny"
    if policy not in POLICIES:
        raise ValueError(f"configs/alfworld.py:{policy}: expected one of {', '.join(POLICIES)}")
    config = config_lib.base()
    # Without the variable: a folder that is not there, which is refused with a clear line.
    config.environment.data = os.environ.get("ALFWORLD_DATA") or "$ALFWORLD_DATA (not set)"
    config.eval.split = "valid_seen"
    config.eval.tasks = 0
    config.eval.every = 20
    config.budget.updates = 100
    if policy == "tiny":
        _tiny(config)
    else:
        _qwen(config)
    return config


def _tiny(config: config_dict.ConfigDict) -> None:
    config.environment.max_turns = 50
    config.policy.init = "package:quickstart"
    # Real games have up to 53 receptacles: longer prompts and longer searches than generated ones.
    config.policy.context = 2048
    config.rollout.action_tokens = 24
    config.batch.tasks = 8
    config.batch.row_length = 4096
    config.optimizer.learning_rate = 3e-4


def _qwen(config: config_dict.ConfigDict) -> None:
    config.environment.settings.protocol = "bpo"
    config.environment.max_turns = 50
    config.policy.init = "Qwen2.5-7B-Instruct"
    config.policy.dtype = "bfloat16"
    config.policy.remat = "full"
    config.policy.context = 8192
    config.rollout.action_tokens = 512
    config.rollout.slots = 128
    config.batch.tasks = 16
    config.batch.rows = 16
    config.batch.row_length = 16_384
    config.loss.kl_weight = 0.05
    config.loss.normalizer = 2000.0
    config.optimizer.learning_rate = 2e-6
    config.optimizer.schedule = "cosine"
    config.eval.temperature = 0.4
