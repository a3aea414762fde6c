"""How much of the sampling rate is left when sandboxes are slow.

    python benchmarks/sandbox_latency.py [--repeats=3] [--branches=64] [--turns=4]

Grows one trajectory for each of `--branches` tasks, of so many turns, on a random policy of the
shape of SmolLM2-135M (float32). A turn ends with any of a sixteenth of the vocabulary, so turns
have different lengths. In one run a sandbox takes from 1 to 200 ms for every action, drawn from
the task and the turn; in the other it answers at once. Both run the free way
(``rollout.deterministic=False``). Prints one JSON object: tokens per second, and the median ratio
over pairs of runs taken one after the other, with its range. The seconds in which the engine had
nothing to do stand beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.tree_forward import SMOLLM2_135M
from bpo_jax.ledger import Ledger
from bpo_jax.models import decoder
from bpo_jax.models.config import DecoderConfig
from bpo_jax.rollout.branching import Branching, BranchingConfig
from bpo_jax.rollout.engine import PagedEngine
from bpo_jax.rollout.grower import Grower
from bpo_jax.rollout.lines import Limits
from bpo_jax.sandbox.api import Message, StepResult, Task

PROMPT, OBSERVATION = 64, 16
"""Tokens of the first prompt and of every observation."""
LATENCY = (0.001, 0.200)
"""Seconds."""


def word(*parts: Any) -> int:
    """A number from 0 to 2^32 - 1 named by `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass
class Sandbox:
    """Goes on for a number of turns, and takes its time for each."""

    environment: Sandboxes
    task: Task
    turn: int = 0

    def reset(self) -> StepResult:
        return StepResult(observation="start")

    def step(self, action: str) -> StepResult:
        low, high = self.environment.latency
        time.sleep(low + (high - low) * word(self.task.id, self.turn) / 2**32)
        self.turn += 1
        done = self.turn == self.environment.max_turns
        return StepResult(observation=f"{self.task.id} {self.turn}", done=done)

    def snapshot(self) -> int:
        return self.turn

    def state_hash(self) -> str:
        return str(self.turn)

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Sandboxes:
    """A task family and its backend."""

    latency: tuple[float, float]
    max_turns: int
    inline: bool = False

    def start(self, task: Task) -> Sandbox:
        return Sandbox(self, task)

    def fork(self, snapshot: int, k: int) -> list[Sandbox]:
        raise NotImplementedError("nothing forks here")

    def release(self, snapshot: int) -> None:
        pass

    def prompt(self, task: Task, first_observation: str) -> list[Message]:
        return [{"role": "user", "content": task.id}]

    def parse(self, text: str) -> str:
        return text


@dataclasses.dataclass
class Numbers:
    """A dialogue without words: token ids named by what is said."""

    vocab_size: int

    def _ids(self, text: str, count: int) -> np.ndarray:
        return np.random.default_rng(word(text)).integers(0, self.vocab_size, count, np.int32)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        return self._ids(messages[0]["content"], PROMPT)

    def observation_ids(self, observation: str, *, stopped: bool, room: int) -> np.ndarray:
        return self._ids(observation, OBSERVATION)

    def shown(self, observation: str, *, stopped: bool, room: int) -> str:
        return observation

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in token_ids)


def run(args: argparse.Namespace, config: DecoderConfig) -> dict[str, Any]:
    graphdef, params = decoder.init(config, 0)
    context = PROMPT + args.turns * (args.tokens + OBSERVATION)
    engine = PagedEngine(
        graphdef=graphdef,
        config=config,
        params=params,
        stop_ids=range(0, config.vocab_size, 16),
        slots=args.branches,
        context=context,
    )
    tasks = [Task(id=f"task {i}", kind="slow") for i in range(args.branches)]

    def rate(latency: tuple[float, float]) -> tuple[float, float]:
        """Sampled tokens per second, and the share of the time without work for the engine."""
        sandboxes = Sandboxes(latency=latency, max_turns=args.turns)
        grower = Grower(
            environment=sandboxes,  # type: ignore[arg-type]
            backend=sandboxes,
            engines=[engine],
            dialogue=Numbers(config.vocab_size),  # type: ignore[arg-type]
            limits=Limits(max_turns=args.turns, max_turn_tokens=args.tokens, context=context),
            threads=args.branches,
            deterministic=False,
        )
        ledger = Ledger()
        began = time.perf_counter()
        grower.grow(
            tasks,
            roots=1,
            rule=Branching(BranchingConfig(placement="none")),
            seed=0,
            temperature=1.0,
            ledger=ledger,
        )
        seconds = time.perf_counter() - began
        return ledger.decoded / seconds, grower.waits.sandboxes / seconds

    engine.warmup()
    pairs = [(rate(LATENCY), rate((0.0, 0.0))) for _ in range(args.repeats)]
    ratios = [slow / fast for (slow, _), (fast, _) in pairs]
    return {
        "branches": args.branches,
        "latency_ms": [1000 * x for x in LATENCY],
        "tokens_per_s": round(statistics.median(slow for (slow, _), _ in pairs), 1),
        "tokens_per_s_without_latency": round(statistics.median(fast for _, (fast, _) in pairs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "engine_idle": round(statistics.median(idle for (_, idle), _ in pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs")
    parser.add_argument("--branches", type=int, default=64, help="trajectories at the same time")
    parser.add_argument("--turns", type=int, default=4, help="of each")
    parser.add_argument("--tokens", type=int, default=48, help="most of a turn")
    args = parser.parse_args()
    print(json.dumps({"platform": jax.default_backend()} | run(args, SMOLLM2_135M), indent=2))


if __name__ == "__main__":
    main()
