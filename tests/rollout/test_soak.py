"""Random load with random failures, for as long as one likes: nothing hangs, nothing is lost.

BPO_SOAK_SECONDS=600 python -m pytest -m slow tests/rollout/test_soak.py
"""

import os
import random
import threading
import time

import pytest

from bpo_jax.ledger import Ledger
from tests.rollout import scripted, toys

SECONDS = float(os.environ.get("BPO_SOAK_SECONDS", "30"))


@pytest.mark.slow
def test_random_load_with_failing_sandboxes_leaves_nothing_behind():
    rng = random.Random(0)
    # Few pages: branches lose theirs and are computed again.
    engine = toys.make_engine(tokens=150, decode=toys.NumberDialogue().text)
    threads = threading.active_count()
    ends = {"done": 0, "truncated": 0, "masked": 0}
    end, rounds = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        rounds += 1
        placement = rng.choice(
            ["none", "threshold", "random", "uniform", "oracle", "post_hoc_top_m", "post_hoc_ht"]
        )
        rule = toys.branching(
            placement=placement,
            siblings=rng.randint(2, 4),
            forks_per_root=rng.randint(1, 4),
            boundary=rng.choice(["turn", "marker"]),
            markers=("7", "12"),
            entropy="first_token" if "post" in placement else rng.choice(["first_token", "probe"]),
            probes=3,
            quantile=0.5,
            initial_threshold=rng.choice([0.0, 1.0]),
        )
        slowness = rng.choice([0.0, 0.001, 0.02])
        environment = scripted.SlowEnvironment(
            delay=lambda task, turns, s=slowness: s * ((turns + len(task)) % 4),
            failing=rng.choice([0.0, 0.05, 0.3]),
            seed=rounds,
        )
        environment.invalid_every = rng.choice([0, 0, 3])
        ledger = Ledger()
        trees = toys.grow(
            n=rng.randint(1, 6),
            roots=rng.randint(1, 4),
            rule=rule,
            engine=engine,
            environment=environment,
            ledger=ledger,
            seed=rounds,
            deterministic=rng.random() < 0.5,
            threads=rng.randint(1, 8),
            retries=rng.randint(0, 2),
            max_turns=rng.randint(1, 6),
            context=rng.choice([40, 96]),
            step_seconds=rng.choice([None, None, 0.05]),
        )
        leaves = [leaf for t in trees for leaf in t.leaves()]
        for leaf in leaves:
            ends[leaf.end] += 1
        masked = sum(leaf.end == "masked" for leaf in leaves)
        assert ledger.returns + masked == len(leaves)
        assert ledger.decoded == sum(len(a.token_ids) for t in trees for a in t.actions())
        assert ledger.forks == sum(len(t.forks()) for t in trees)
        assert engine.free_slots == engine.slots and engine.stats()["pages"] == 0
        for _ in range(100):  # calls that were given up on are still in their threads
            if environment.opened == environment.closed and environment.taken <= (
                environment.released
            ):
                break
            time.sleep(0.02)
        assert environment.opened == environment.closed
        assert environment.taken == environment.released
    for _ in range(100):
        if threading.active_count() == threads:
            break
        time.sleep(0.02)
    assert threading.active_count() == threads
    assert min(ends.values()) > 0 and engine.stats()["recomputed"] > 0, (rounds, ends)
