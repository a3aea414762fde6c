"""Household games from two commands: BPO trains a small cloned policy, on a CPU, with no data.

    python -m bpo_jax.main --config=configs/quickstart.py --workdir=/tmp/quickstart

Needs: nothing but the package. The policy (0.9 million parameters, Qwen2.5's architecture) is
shipped with it and the games are generated. Takes: 10 minutes on two cores (seed 0, partly busy).
Result so far: success on 200 held-out games 37.5% before, 38.0% after: no improvement yet.
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
    config.rollout.slots = 80
    # Refused commands are common at first. Not shown to raise success.
    config.rollout.invalid_penalty = 0.02
    # With an eps this large Adam's step is close to momentum's: tried because most of a gradient is
    # noise at this batch size. Not shown to do better than the usual 1e-8.
    config.optimizer.eps = 1e-2
    config.optimizer.learning_rate = 2e-2
    config.optimizer.schedule = "cosine"
    config.batch.tasks = 8
    config.batch.rows = 2
    config.batch.row_length = 2048
    config.budget.updates = 70
    config.eval.split = "test"
    config.eval.tasks = 200
    return config
