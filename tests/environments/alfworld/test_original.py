"""The engine against the original: TextWorld itself plays along, where it is installed."""

import importlib
import os
import pathlib
import random
from typing import Any

import pytest

from bpo_jax.environments.alfworld import engine, loader

STEPS = 25
JUNK = ("", "xyzzy", "Look", " look ", "examine", "go to loc 5", "put mug 1 in/on desk 1")


def _original(path: str) -> Any:
    """The original environment on one game, named as the benchmark names things."""
    textworld = importlib.import_module("textworld")
    pddl = importlib.import_module("textworld.envs.pddl")
    names = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    env = names.AlfredDemangler(pddl.PddlEnv(infos))
    env.load(path)
    return env


def _pick(rng: random.Random, admissible: list[str], seen: list[str]) -> str:
    """A command: one of the rarer admissible ones, any admissible one, an old one or junk."""
    roll = rng.random()
    if roll < 0.15:
        command = rng.choice([*JUNK, *seen])
        return rng.choice([command, command.upper(), f"  {command}\n", command[:-1]])
    rare = [one for one in admissible if not one.startswith(("go to", "look", "help", "inventory"))]
    return rng.choice(rare if rare and roll < 0.6 else admissible)


def _some_games() -> list[pathlib.Path]:
    """Every official game at hand, or a fixed sample where there are very many."""
    if not os.environ.get("ALFWORLD_DATA"):
        return []
    paths = sorted(loader.data_folder().glob(f"json_2.1.1/*/*/*/{loader.GAME_FILE}"))
    return random.Random(0).sample(paths, min(len(paths), 100))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("ALFWORLD_DATA"),
    reason="official games: run `alfworld-download` and set ALFWORLD_DATA",
)
@pytest.mark.parametrize("path", _some_games(), ids=lambda path: path.parent.parent.name)
def test_random_play_is_the_same_as_in_the_original(path: pathlib.Path) -> None:
    pytest.importorskip("textworld", reason="the original engine: pip install alfworld")
    pytest.importorskip("alfworld", reason="the original engine: pip install alfworld")
    game = loader.load_game(path)
    env = _original(str(path))
    theirs = env.reset()
    state = engine.initial_state(game)
    assert engine.first_observation(game) == theirs["feedback"]
    rng = random.Random(game.id)
    seen: list[str] = []
    for _ in range(STEPS):
        admissible = engine.admissible(game, state)
        assert admissible == list(theirs["admissible_commands"])
        command = _pick(rng, admissible, seen)
        seen += [one for one in admissible if not one.startswith("go to")]
        theirs, reward, _ = env.step(command)
        state, *ours = engine.step(game, state, command)
        assert ours == [theirs["feedback"], reward, theirs["won"]], command
