"""ALFWorld as a task family: its splits of games, and the sandbox that plays one.

Without data the games are generated: "train" is an endless stream of fresh ones, "valid" and "test"
are fixed lists whose seeds no training game can have. With the official data the splits are the
official ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from bpo_jax import action_formats
from bpo_jax.environments.alfworld import engine, loader
from bpo_jax.environments.alfworld.expert import Searcher
from bpo_jax.environments.alfworld.game import Game, State
from bpo_jax.environments.alfworld.generator import KINDS, Size, generate, size_named
from bpo_jax.environments.alfworld.protocols import PROTOCOLS, Protocol, with_admissible
from bpo_jax.sandbox import api

_FIRST_SEED = {"test": 0, "valid": 500_000, "train": 1_000_000}
_MOST_HELD_OUT = 500_000  # so that "valid" ends before "train" begins
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlfworldEnvironment:
    """The household games; an `api.Environment`.

    Attributes:
      data: folder of the official data (it holds ``json_2.1.1``); empty for generated games.
      size: of generated games, a key of `generator.SIZES` or a `generator.Size`.
      kinds: the kinds of task to play, of `generator.KINDS`.
      held_out: number of generated games in each of "valid" and "test".
      protocol: how game and policy talk, a key of `protocols.PROTOCOLS`.
      action_format: how an action stands in a turn, a key of `action_formats.FORMATS`; empty for
        the protocol's own.
      max_turns: turns after which an episode is truncated; 0 for the protocol's own length.
      expert_knows_homes: the demonstrator searches first where the object can be at all.
      expert_idleness: probability that one of the demonstrator's commands is idle; below 1.

    Raises:
      ValueError: if one of them is none of these.
    """

    data: str = ""
    size: str | Size = "small"
    kinds: tuple[str, ...] = KINDS
    held_out: int = 200
    protocol: str = "plain"
    action_format: str = ""
    max_turns: int = 0
    expert_knows_homes: bool = False
    expert_idleness: float = 0.0

    def __post_init__(self) -> None:
        kinds = tuple(self.kinds)
        object.__setattr__(self, "kinds", kinds)
        size_named(self.size)
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f"expected kinds to be some of {', '.join(KINDS)}, got {kinds}")
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"unknown protocol {self.protocol!r}: expected one of {', '.join(PROTOCOLS)}"
            )
        if not self.action_format:
            object.__setattr__(self, "action_format", self.rules.action_format)
        action_formats.named(self.action_format)
        if not 1 <= self.held_out <= _MOST_HELD_OUT:
            raise ValueError(f"expected 1 <= held_out <= {_MOST_HELD_OUT}, got {self.held_out}")
        if not 0.0 <= self.expert_idleness < 1.0:
            raise ValueError(f"expected 0 <= expert_idleness < 1, got {self.expert_idleness}")
        if self.max_turns < 0:
            raise ValueError(f"expected max_turns of 1 or more, got {self.max_turns}")
        if not self.max_turns:
            object.__setattr__(self, "max_turns", self.rules.max_turns)
        if self.data:
            loader.data_folder(self.data)

    @property
    def rules(self) -> Protocol:
        """The protocol spoken."""
        return PROTOCOLS[self.protocol]

    @property
    def format(self) -> action_formats.ActionFormat:
        """How an action stands in a turn."""
        return action_formats.named(self.action_format)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of a turn at whose end it may branch; see `action_formats.ActionFormat`."""
        return self.format.markers

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits there are."""
        return tuple(loader.SPLITS) if self.data else ("train", "valid", "test")

    def tasks(self, split: str, seed: int) -> TaskStream:
        """The games of a split.

        Args:
          split: one of `splits`. "train" never ends; the others are finite and in a fixed order.
          seed: of the order of "train"; the others do not depend on it.

        Raises:
          ValueError: if there is no such split.
          loader.GameFileError: if the data has no games of it.
        """
        if split not in self.splits:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(self.splits)}")
        get: Callable[[int], api.Task]
        if self.data:
            paths = self._paths(split)
            endless = split == "train"
            order = functools.lru_cache(maxsize=1)(
                _order if endless else lambda count, *_: range(count)
            )

            def get(position: int) -> api.Task:
                epoch, index = divmod(position, len(paths))
                return self._official(paths[order(len(paths), seed, epoch)[index]])

            return TaskStream(split, seed, get, None if endless else len(paths))
        if split == "train":
            return TaskStream(split, seed, lambda at: self._generated(_train_seed(seed, at)), None)
        first = _FIRST_SEED[split]
        return TaskStream(split, seed, lambda at: self._generated(first + at), self.held_out)

    def start(self, task: api.Task) -> AlfworldSandbox:
        """A sandbox of the task, before its first observation."""
        return AlfworldSandbox(self, task.payload)

    def prompt(self, task: api.Task, first_observation: str) -> Sequence[api.Message]:
        """The instructions, where there are any, as a system message; the observation as a user's.

        The protocol says what to do, the action format how to write it.
        """
        told = "\n\n".join(part for part in (self.rules.aim, self.format.instructions) if part)
        system = [{"role": "system", "content": told}] if told else []
        return system + [{"role": "user", "content": first_observation}]

    def parse(self, text: str) -> str | api.InvalidAction:
        """The command in a turn; an unreadable one has the protocol's penalty."""
        command = self.format.parse(text)
        if isinstance(command, api.InvalidAction):
            return dataclasses.replace(command, penalty=self.rules.invalid_penalty)
        return command.lower() if self.rules.lower_case else command

    def turn(self, command: str, thought: str = "") -> str:
        """A turn that `parse` reads as the command; what a policy is cloned from."""
        return self.format.write(command, thought)

    def expert(self, task: api.Task, seed: int) -> Searcher:
        """A player of the game that goes by what it sees."""
        return Searcher(
            task.payload,
            seed,
            knows_homes=self.expert_knows_homes,
            idleness=self.expert_idleness,
        )

    def _generated(self, seed: int) -> api.Task:
        kind = self.kinds[seed % len(self.kinds)]
        game = generate(seed, size=self.size, kind=kind)
        return api.Task(id=game.id, kind=game.task, payload=game)

    def _official(self, path: pathlib.Path) -> api.Task:
        game = loader.load_game(path)
        return api.Task(id=game.id, kind=game.task, payload=game)

    def _paths(self, split: str) -> list[pathlib.Path]:
        """The game files of a split whose kind is wanted."""
        folders = {loader.TASK_TYPES[kind] for kind in self.kinds}
        found = loader.find_games(split, self.data)
        paths = [path for path in found if path.parent.parent.name.split("-")[0] in folders]
        if not paths:
            raise loader.GameFileError(
                f"{self.data} has no {split} games of the kinds {', '.join(self.kinds)}"
            )
        return paths


def _train_seed(seed: int, position: int) -> int:
    """The game's seed at a position of a training stream: spread out, and never a held-out one."""
    digest = hashlib.sha256(f"train/{seed}/{position}".encode()).digest()
    return _FIRST_SEED["train"] + int.from_bytes(digest[:6], "big")


def _order(count: int, seed: int, epoch: int) -> list[int]:
    """The shuffled indices of one pass over a list of games."""
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


class TaskStream:
    """Tasks by position; an `api.TaskIterator`.

    Attributes:
      length: how many tasks there are in all; None where the stream never ends.
    """

    def __init__(
        self, split: str, seed: int, get: Callable[[int], api.Task], length: int | None
    ) -> None:
        self._split = split
        self._seed = seed
        self._get = get
        self.length = length
        self._position = 0

    def __iter__(self) -> TaskStream:
        return self

    def __next__(self) -> api.Task:
        if self.length is not None and self._position >= self.length:
            raise StopIteration
        task = self._get(self._position)
        self._position += 1
        return task

    def state_dict(self) -> dict[str, Any]:
        """Which stream it is, and how far it has come."""
        return {"split": self._split, "seed": self._seed, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
          ValueError: if it was taken from another stream.
        """
        mine = self.state_dict()
        for key in ("split", "seed"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"cannot resume a stream with {key} {mine[key]!r} from one with {state[key]!r}"
                )
        self._position = state["position"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlfworldSnapshot:
    """Everything a sandbox is at one moment.

    Attributes:
      environment: the task family it plays for.
      game: what is played.
      state: of the game.
      turns: taken so far.
    """

    environment: AlfworldEnvironment
    game: Game
    state: State
    turns: int

    def restore(self) -> AlfworldSandbox:
        """A new sandbox in this state."""
        return AlfworldSandbox(self.environment, self.game, self.state, self.turns)


class AlfworldSandbox:
    """One play of one game; an `api.Sandbox`."""

    def __init__(
        self,
        environment: AlfworldEnvironment,
        game: Game,
        state: State | None = None,
        turns: int = 0,
    ) -> None:
        self._environment = environment
        self._game = game
        self._state = engine.initial_state(game) if state is None else state
        self._turns = turns

    def reset(self) -> api.StepResult:
        """The first observation, without the banner of the original program."""
        self._state = engine.initial_state(self._game)
        self._turns = 0
        text = engine.first_observation(self._game).removeprefix(_BANNER).lstrip("\n")
        return self._result(text, won=False, invalid=False)

    def step(self, action: str) -> api.StepResult:
        """Plays one command; an empty one stands for a turn in which none could be read."""
        self._state, text, _, won = engine.step(self._game, self._state, action)
        self._turns += 1
        rules = self._environment.rules
        return dataclasses.replace(
            self._result(text, won=won, invalid=text == engine.REFUSED),
            reward=won * rules.win_reward - (not action.strip()) * rules.invalid_penalty,
            done=won,
            truncated=not won and self._turns >= self._environment.max_turns,
        )

    def snapshot(self) -> AlfworldSnapshot:
        """The present state, which later steps do not touch."""
        return AlfworldSnapshot(
            environment=self._environment, game=self._game, state=self._state, turns=self._turns
        )

    def state_hash(self) -> str:
        """Equal for equal games, states and numbers of turns, in any process."""
        fields = [getattr(self._state, field.name) for field in dataclasses.fields(self._state)]
        plain = [sorted(value) if isinstance(value, frozenset) else value for value in fields]
        described = repr((self._game.id, self._turns, plain))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def close(self) -> None:
        """Nothing to give back."""

    def _result(self, text: str, *, won: bool, invalid: bool) -> api.StepResult:
        info: dict[str, Any] = {"won": won, "invalid": invalid}
        if self._environment.rules.lists_admissible:
            info["admissible"] = engine.admissible(self._game, self._state)
            text = with_admissible(text, info["admissible"])
        return api.StepResult(observation=text, info=info)
