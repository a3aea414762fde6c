"""A tiny random policy, a dialogue of numbers and a scripted environment."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bpo_jax.ledger import Ledger
from bpo_jax.models import decoder
from bpo_jax.rollout import sampling
from bpo_jax.rollout.api import Engine
from bpo_jax.rollout.branching import Branching, BranchingConfig
from bpo_jax.rollout.engine import PagedEngine, Shapes
from bpo_jax.rollout.grower import Grower
from bpo_jax.rollout.lines import Limits
from bpo_jax.sandbox.api import InfraError, InvalidAction, StepResult, Task
from bpo_jax.tree import Action, Decision, Tree

STOP = 1
CONFIG = decoder.DecoderConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)


LONG = dataclasses.replace(CONFIG, max_positions=2048)
SHAPES = Shapes(rows=(4, 8), past=(3, 6), prefill=((2, 16), (4, 8)), steps=4, window=8)


def text(ids) -> str:
    """A letter for every token."""
    return "".join(chr(ord("a") + int(i)) for i in ids)


@functools.cache
def policy():
    """Random weights, scaled up so that distributions differ visibly from uniform."""
    graphdef, params = decoder.init(CONFIG, 0)
    return graphdef, jax.tree.map(lambda p: p * 3.0 if p.ndim > 1 else p, params)


def make_engine(**options) -> PagedEngine:
    graphdef, params = policy()
    if options.get("slots", 8) != 8:
        options["shapes"] = dataclasses.replace(SHAPES, rows=(options["slots"],))
    options = {
        "slots": 8,
        "context": 96,
        "stop_ids": [STOP],
        "decode": text,
        "shapes": SHAPES,
        "config": CONFIG,
    } | options
    return PagedEngine(graphdef=graphdef, params=params, **options)


@functools.cache
def shared_engine() -> PagedEngine:
    """One engine for many tests, since each compiles its own functions."""
    return make_engine()


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, params, tokens_bt):
    model = nnx.merge(graphdef, params)
    b, t = tokens_bt.shape
    position = jnp.broadcast_to(jnp.arange(t), (b, t))
    hidden = model(tokens_bt, position, jnp.full((b, t), t, jnp.int32))
    return hidden @ model.head_dv()


def forward_distribution(context: list[int]) -> np.ndarray:
    """Log-probabilities of the token after a context."""
    return np.array([forward_scores(context, [token])[0][0] for token in range(CONFIG.vocab_size)])


def uncached_turn(context: list[int], seed: int, count: int) -> list[int]:
    """The next tokens of a branch at temperature 1, every one by a full forward pass."""
    ids = list(context)
    key = jnp.array([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32)
    for _ in range(count):
        tokens = np.zeros((1, 128), np.int32)
        tokens[0, : len(ids)] = ids
        logits = _forward(*policy(), tokens)[0, len(ids) - 1]
        uniform = sampling.uniforms(key, jnp.array([len(ids)]))
        ids.append(int(sampling.draw(jax.nn.log_softmax(logits)[None], uniform)[0]))
    return ids[len(context) :]


def forward_scores(context: list[int], turn: list[int], temperature: float = 1.0):
    """Log-probabilities and entropies of a turn after a context, by one full forward pass."""
    ids = np.zeros((1, -(-(len(context) + len(turn)) // 128) * 128), np.int32)
    ids[0, : len(context) + len(turn)] = [*context, *turn]
    logp = jax.nn.log_softmax(_forward(*policy(), ids)[0] / temperature, axis=-1)
    at = np.arange(len(context) - 1, len(context) + len(turn) - 1)
    rows = np.asarray(logp)[at]
    return rows[np.arange(len(turn)), turn], -(np.exp(rows) * rows).sum(-1)


class NumberDialogue:
    """Messages are numbers; a marker opens every user message and every turn."""

    stop_id = STOP
    USER, REPLY = 2, 3

    def _ids(self, text: str) -> list[int]:
        return [4 + int(word) % (CONFIG.vocab_size - 4) for word in text.split()]

    def prompt_ids(self, messages) -> np.ndarray:
        ids = [i for m in messages for i in (self.USER, *self._ids(m["content"]))]
        return np.array([*ids, self.REPLY], np.int32)

    def observation_ids(
        self, observation: str, *, stopped: bool, room: int | None = None
    ) -> np.ndarray:
        forced = [] if stopped else [STOP]
        return np.array([*forced, self.USER, *self._ids(observation), self.REPLY], np.int32)

    def shown(self, observation: str, *, stopped: bool, room: int | None = None) -> str:
        return observation

    def text(self, token_ids) -> str:
        return " ".join(str(i) for i in token_ids if i != STOP)


def _digest(*parts) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass
class Faults:
    """Which of all executed steps break, and how; counted over every sandbox."""

    breaks: frozenset[int] = frozenset()
    raises: bool = True
    from_step: int | None = None
    steps: int = 0

    def strike(self) -> str | None:
        self.steps += 1
        broken = self.steps in self.breaks or (
            self.from_step is not None and self.steps >= self.from_step
        )
        if broken and self.raises:
            raise InfraError("the sandbox is gone")
        return "the sandbox is gone" if broken else None


class ScriptedSandbox:
    """Observation, reward and end are functions of the task and of the actions executed."""

    def __init__(self, environment, task, past=()):
        self.environment, self.task, self.past = environment, task, tuple(past)
        environment.opened += 1
        self.closed = False

    def reset(self) -> StepResult:
        return StepResult(observation=f"{_digest(self.task.id) % 20} 7")

    def step(self, action: str) -> StepResult:
        error = self.environment.faults.strike()
        if error:
            self.past = ("broken",)
            return StepResult(observation="", infra_error=error)
        self.past = (*self.past, action)
        word = _digest(self.task.id, self.past)
        done = len(self.past) >= 2 + word % 4
        return StepResult(
            observation=f"{word % 20} {word // 20 % 20}",
            reward=float(done and word % 3 == 0),
            done=done,
            info={"won": done and word % 3 == 0, "admissible": ["a", "b"]},
        )

    def snapshot(self):
        self.environment.taken += 1
        return (self.task.id, self.past)

    def state_hash(self) -> str:
        return str(_digest(self.past))

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.environment.closed += 1


class ScriptedEnvironment:
    """An environment and its own backend."""

    max_turns = 8
    inline = True

    def __init__(self, faults: Faults | None = None, invalid_every: int = 0):
        self.faults = faults or Faults()
        self.invalid_every = invalid_every
        self.started: list[str] = []
        self.opened = self.closed = self.taken = self.released = 0

    def start(self, task: Task) -> ScriptedSandbox:
        self.started.append(task.id)
        return ScriptedSandbox(self, task)

    def fork(self, snapshot, k):
        task_id, past = snapshot
        return [ScriptedSandbox(self, Task(id=task_id, kind="toy"), past) for _ in range(k)]

    def release(self, snapshot) -> None:
        self.released += 1

    def prompt(self, task, first_observation):
        return [{"role": "user", "content": first_observation}]

    def parse(self, text: str):
        if self.invalid_every and _digest(text) % self.invalid_every == 0:
            return InvalidAction(reason="13")
        return text


def tasks(n: int) -> list[Task]:
    return [Task(id=f"task-{i}", kind="toy") for i in range(n)]


def branching(**options) -> Branching:
    return Branching(BranchingConfig(**({"initial_threshold": 0.0} | options)))


def grow(
    *,
    n: int = 2,
    roots: int = 2,
    rule: Branching | None = None,
    engine: PagedEngine | None = None,
    engines: Sequence[Engine] = (),
    environment: ScriptedEnvironment | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    temperature: float = 1.0,
    threads: int = 4,
    deterministic: bool = True,
    clock=time.monotonic,
    **limits,
) -> list[Tree]:
    environment = environment or ScriptedEnvironment()
    grower = Grower(
        environment=environment,
        backend=environment,
        engines=engines or [engine or shared_engine()],
        dialogue=NumberDialogue(),
        limits=Limits(**({"max_turns": 6, "max_turn_tokens": 6, "context": 96} | limits)),
        threads=threads,
        deterministic=deterministic,
        clock=clock,
    )
    return grower.grow(
        tasks(n),
        roots=roots,
        rule=rule or branching(),
        seed=seed,
        temperature=temperature,
        ledger=ledger if ledger is not None else Ledger(),
    )


def paths(tree: Tree) -> list[list[tuple[Decision, Action]]]:
    """Every trajectory as (decision, action) pairs."""
    found = []
    for actions in tree.paths():
        decision, pairs = tree.root, []
        for action in actions:
            pairs.append((decision, action))
            decision = action.next
        found.append(pairs)
    return found


def plain(tree: Tree):
    """Everything a tree says, as values that compare."""

    def visit(decision: Decision):
        return (
            decision.context_ids.tolist(),
            decision.entropy,
            decision.planned,
            [
                (
                    a.token_ids.tolist(),
                    a.logprobs.tolist(),
                    a.entropies.tolist(),
                    a.reward,
                    a.end,
                    a.info,
                    None if a.next is None else visit(a.next),
                )
                for a in decision.actions
            ],
        )

    return tree.task_id, visit(tree.root)
