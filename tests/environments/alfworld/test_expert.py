"""The planner and the searcher: both win, the searcher by what it has seen alone."""

import dataclasses
import os

import pytest

from bpo_jax.environments.alfworld import engine, loader
from bpo_jax.environments.alfworld.expert import Searcher, plan
from bpo_jax.environments.alfworld.generator import KINDS, generate


def _commands(game, player, limit):
    """What the player says until it wins; None if it does not within the limit."""
    state, text, said = game.start, engine.first_observation(game), []
    for _ in range(limit):
        said.append(player.act(text))
        state, text, _, won = engine.step(game, state, said[-1])
        if won:
            return said
    return None


def test_searcher_wins_500_small_games_within_24_turns():
    kinds, turns = set(), 0
    for seed in range(500):
        game = generate(seed)
        said = _commands(game, Searcher(game, seed), 24)
        assert said is not None, game.id
        assert len(said) >= len(game.walkthrough)
        kinds.add(game.task)
        turns += len(said)
    assert kinds == set(KINDS)
    assert 8 <= turns / 500 <= 14


@pytest.mark.parametrize("size", ["standard", "large"])
def test_searcher_wins_larger_games(size):
    for seed in range(24):
        game = generate(seed, size=size)
        assert _commands(game, Searcher(game, seed), 60) is not None, game.id


def test_searcher_that_knows_homes_is_faster():
    def mean(knows_homes):
        games = [generate(seed) for seed in range(60)]
        turns = [
            len(_commands(game, Searcher(game, 0, knows_homes=knows_homes), 50)) for game in games
        ]
        return sum(turns) / len(turns)

    assert mean(True) < mean(False) - 0.5


def test_searcher_says_only_what_is_admissible():
    for seed in range(30):
        game = generate(seed)
        state, text, won = game.start, engine.first_observation(game), False
        player = Searcher(game, seed)
        while not won:
            command = player.act(text)
            assert command in engine.admissible(game, state)
            state, text, _, won = engine.step(game, state, command)


def test_searcher_goes_by_the_texts_and_not_by_the_hidden_state():
    game = generate(3)
    emptied = dataclasses.replace(game.start, contents=tuple(() for _ in game.receptacles))
    other = dataclasses.replace(game, start=emptied, walkthrough=None)
    state, text, won = game.start, engine.first_observation(game), False
    knowing, blind = Searcher(game, 5), Searcher(other, 5)
    while not won:
        command = knowing.act(text)
        assert blind.act(text) == command
        state, text, _, won = engine.step(game, state, command)


def test_searcher_never_searches_a_place_twice():
    for seed in range(60):
        game = generate(seed, kind="put")
        said = _commands(game, Searcher(game, seed), 50)
        taken = next(i for i, command in enumerate(said) if command.startswith("take"))
        visits = [command for command in said[:taken] if command.startswith("go to")]
        assert len(visits) == len(set(visits))


def test_order_of_search_comes_from_the_seed():
    game = generate(8)
    said = [tuple(_commands(game, Searcher(game, seed), 50)) for seed in (1, 1, 2, 3, 4)]
    assert said[0] == said[1]
    assert len(set(said)) > 1


def test_plan_of_an_impossible_game_is_refused():
    game = generate(0)
    bare = dataclasses.replace(
        game, start=dataclasses.replace(game.start, contents=tuple(() for _ in game.receptacles))
    )
    with pytest.raises(ValueError, match="no plan reaches its goal"):
        plan(bare)


needs_data = pytest.mark.skipif(
    not os.environ.get("ALFWORLD_DATA"),
    reason="official games: set ALFWORLD_DATA to the folder that holds json_2.1.1",
)


@needs_data
def test_plan_is_as_short_as_the_official_one_and_the_searcher_wins():
    for split in loader.SPLITS:
        for path in loader.find_games(split)[:24]:
            game = loader.load_game(path)
            state = game.start
            commands = plan(game)
            for command in commands:
                state, *_ = engine.step(game, state, command)
            assert engine.won(game, state), game.id
            assert len(commands) <= len(game.walkthrough), game.id
            assert _commands(game, Searcher(game, 0), 200) is not None, game.id


def test_an_idle_searcher_wins_as_well_and_wastes_its_share_of_turns():
    games = dict(enumerate(map(generate, range(60))))  # by seed
    idle = ("look", "inventory")
    said = [_commands(game, Searcher(game, i, idleness=0.5), 200) for i, game in games.items()]
    assert all(commands is not None for commands in said)
    commands = [command for game in said for command in game]
    assert 0.45 < sum(command in idle for command in commands) / len(commands) < 0.55
    # What is not idle is what it would have played anyway.
    useful = [[command for command in game if command not in idle] for game in said]
    assert useful == [_commands(game, Searcher(game, i), 60) for i, game in games.items()]


def test_mistakes_do_not_change_what_is_played_next():
    game = generate(5)
    player = Searcher(game, 3)
    act = player.act

    def careless(observation):
        player.mistake()
        return act(observation)

    player.act = careless
    assert _commands(game, player, 60) == _commands(game, Searcher(game, 3), 60)
