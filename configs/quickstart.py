"""Household games from two commands: BPO trains a small cloned policy, on a CPU, with no data.

    python -m bpo_jax.main --config=configs/quickstart.py --workdir=/tmp/quickstart

Needs: nothing but the package. The policy (0.9 million parameters, Qwen2.5's architecture) is
shipped with it and the games are generated. It was cloned from a player that wastes half of its
turns looking around, so that there is something to learn: a game must be won in 24 turns.
Takes: about 10 minutes on two cores.
Result, success on 200 held-out games at temperature 0.4, +31.5 points on average:
  seed 0: 8.5% (17) before, 41.5% (83) after, 9.7 minutes
  seed 1: 10.5% (21) before, 43.0% (86) after, 9.2 minutes
  seed 2: 10.5% (21) before, 39.5% (79) after, 9.2 minutes
"""

from ml_collections import config_dict

from bpo_jax import config as config_lib


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """The configuration; `arg` is not used."""
    del arg
    config = config_lib.base()
    config.environment.max_turns = 24
    config.cpu_devices = 2
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.policy.init = "package:quickstart"
    config.policy.context = 768
    config.rollout.action_tokens = 16
    config.rollout.slots = 64
    config.optimizer.learning_rate = 4e-4
    config.batch.tasks = 8
    config.batch.rows = 2
    config.batch.row_length = 2048
    config.budget.updates = 45
    config.eval.split = "test"
    config.eval.tasks = 200
    return config
