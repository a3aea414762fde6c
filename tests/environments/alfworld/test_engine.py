"""The rules and texts of the native ALFWorld engine, on a kitchen small enough to check by hand."""

import dataclasses
import pickle
import time
from typing import Any

import pytest

from bpo_jax.environments.alfworld import engine
from bpo_jax.environments.alfworld.game import Game, Object, Receptacle, State
from bpo_jax.environments.alfworld.goal import goal_for

COUNTER, FRIDGE, MICROWAVE, SINK, DRAWER, SHELF = range(6)
APPLE2, APPLE1, BOWL, KNIFE, LAMP, CUP = range(6)
MIDDLE = 5


def kitchen(
    task: str = "put",
    object_kind: str = "apple",
    target_kind: str = "fridge",
    **start: Any,
) -> Game:
    """Six receptacles at five places (drawer and shelf share one) and six objects."""
    state = State(
        place=MIDDLE,
        contents=((APPLE2, APPLE1, KNIFE), (), (), (), (LAMP, CUP), (BOWL,)),
        lying=frozenset({(APPLE2, 0), (APPLE1, 0), (KNIFE, 0), (BOWL, 4), (LAMP, 4), (CUP, 4)}),
    )
    return Game(
        id="kitchen",
        task=task,
        text="do it.",
        object_kind=object_kind,
        target_kind=target_kind,
        goal=goal_for(task=task, object_kind=object_kind, target_kind=target_kind),
        receptacles=(
            Receptacle(name="countertop 1", kind="countertop", place=0),
            Receptacle(name="fridge 1", kind="fridge", place=1, openable=True),
            Receptacle(name="microwave 1", kind="microwave", place=2, openable=True),
            Receptacle(name="sinkbasin 1", kind="sinkbasin", place=3),
            Receptacle(name="drawer 1", kind="drawer", place=4, openable=True),
            Receptacle(name="shelf 1", kind="shelf", place=4),
        ),
        objects=(
            Object(
                name="apple 2",
                kind="apple",
                heatable=True,
                coolable=True,
                cleanable=True,
                sliceable=True,
            ),
            Object(
                name="apple 1",
                kind="apple",
                heatable=True,
                coolable=True,
                cleanable=True,
                sliceable=True,
            ),
            Object(name="bowl 1", kind="bowl", vessel=True, cleanable=True),
            Object(name="knife 1", kind="knife", cleanable=True),
            Object(name="desklamp 1", kind="desklamp", pickupable=False, toggleable=True),
            Object(name="cup 1", kind="cup"),
        ),
        accepts=frozenset(
            (receptacle, thing)
            for receptacle in ("countertop", "fridge", "drawer", "shelf")
            for thing in ("apple", "bowl", "cup")
        ),
        places=6,
        start=dataclasses.replace(state, **start),
    )


def play(game: Game, *commands: str) -> tuple[State, list[str]]:
    """The last state and all answers of a play from the start."""
    state, texts = engine.initial_state(game), []
    for command in commands:
        state, text, _, _ = engine.step(game, state, command)
        texts.append(text)
    return state, texts


def said(game: Game, *commands: str) -> str:
    """The last answer of a play from the start."""
    return play(game, *commands)[1][-1]


def test_the_first_observation_lists_the_receptacles_and_the_task() -> None:
    assert engine.first_observation(kitchen()) == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a countertop 1, "
        "a fridge 1, a microwave 1, a sinkbasin 1, a drawer 1, and a shelf 1.\n\n"
        "Your task is to: do it."
    )


def test_commands_are_offered_in_alphabetical_order() -> None:
    game = kitchen()
    state, _ = play(game, "go to countertop 1")
    assert engine.admissible(game, state) == [
        "examine countertop 1",
        "go to drawer 1",
        "go to fridge 1",
        "go to microwave 1",
        "go to shelf 1",
        "go to sinkbasin 1",
        "help",
        "inventory",
        "look",
        "take apple 1 from countertop 1",
        "take apple 2 from countertop 1",
        "take knife 1 from countertop 1",
    ]


def test_a_place_is_not_offered_where_one_stands_nor_are_the_others_there() -> None:
    game = kitchen()
    state, _ = play(game, "go to drawer 1")
    offered = engine.admissible(game, state)
    assert "go to drawer 1" not in offered
    assert "go to shelf 1" not in offered
    assert "examine shelf 1" in offered


@pytest.mark.parametrize(
    "command",
    [
        "",
        "xyzzy",
        "GO TO COUNTERTOP 1",
        "Look",
        "go  to countertop 1",
        "go to countertop",
        "go to countertop 1.",
        "take apple 1 from countertop 1",
        "examine apple 1",
        "put apple 1 in/on fridge 1",
    ],
)
def test_what_is_not_admissible_changes_nothing(command: str) -> None:
    game = kitchen()
    state, text, reward, won = engine.step(game, game.start, command)
    assert (state, text, reward, won) == (game.start, "Nothing happens.", 0, False)


def test_blanks_around_a_command_are_dropped() -> None:
    assert said(kitchen(), "  go to shelf 1 \n") == (
        "You arrive at shelf 1. On the shelf 1, you see a bowl 1."
    )


def test_closed_receptacles_hide_and_keep_what_is_in_them() -> None:
    game = kitchen()
    state, texts = play(game, "go to drawer 1", "open drawer 1", "close drawer 1")
    assert texts == [
        "You arrive at drawer 1. The drawer 1 is closed.",
        "You open the drawer 1. The drawer 1 is open. In it, you see a desklamp 1, and a cup 1.",
        "You close the drawer 1.",
    ]
    assert "take cup 1 from drawer 1" not in engine.admissible(game, state)
    assert "use desklamp 1" in engine.admissible(game, state)


def test_only_what_is_held_can_be_examined() -> None:
    game = kitchen()
    state, _ = play(game, "go to countertop 1", "take apple 1 from countertop 1")
    offered = engine.admissible(game, state)
    assert "examine apple 1" in offered
    assert "examine apple 2" not in offered


def test_only_one_thing_is_held_at_a_time() -> None:
    game = kitchen()
    state, texts = play(game, "inventory", "go to countertop 1", "take apple 2 from countertop 1")
    assert texts[0] == "You are not carrying anything."
    assert engine.step(game, state, "inventory")[1] == "You are carrying: a apple 2."
    assert not any(command.startswith("take") for command in engine.admissible(game, state))


def test_things_are_moved_only_where_their_kinds_fit() -> None:
    game = kitchen()
    take = ("go to countertop 1", "take knife 1 from countertop 1", "go to shelf 1")
    assert said(game, *take, "move knife 1 to shelf 1") == "Nothing happens."
    take = ("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1")
    assert said(game, *take, "move apple 1 to fridge 1") == "Nothing happens."
    moved = (*take, "open fridge 1", "move apple 1 to fridge 1")
    assert said(game, *moved) == "You move the apple 1 to the fridge 1."


def test_heating_undoes_cooling_and_the_reverse() -> None:
    game = kitchen()
    held = ("go to countertop 1", "take apple 1 from countertop 1")
    cool = ("go to fridge 1", "cool apple 1 with fridge 1")
    heat = ("go to microwave 1", "heat apple 1 with microwave 1")
    assert said(game, *held, *cool) == "You cool the apple 1 using the fridge 1."
    assert said(game, *held, *cool, "examine apple 1") == "This is a cold apple 1."
    assert said(game, *held, *cool, *heat) == "You heat the apple 1 using the microwave 1."
    assert said(game, *held, *cool, *heat, "examine apple 1") == "This is a hot apple 1."
    state, _ = play(game, *held, *heat, *cool)
    assert (state.hot, state.cool) == (frozenset(), frozenset({APPLE1}))


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ((), "There's nothing special about apple 1."),
        (("sliced",), "This is a sliced apple 1."),
        (("clean",), "This is a clean apple 1."),
        (("hot", "clean"), "This is a hot and clean apple 1."),
        (("cool", "clean"), "This is a cool and clean apple 1."),
        (("cool", "sliced"), "This is a cool sliced apple 1."),
        (("clean", "sliced"), "This is a clean sliced apple 1."),
        (("hot", "clean", "sliced"), "This is a hot and clean sliced apple 1."),
    ],
)
def test_what_an_object_in_the_hand_looks_like(properties: tuple[str, ...], text: str) -> None:
    became: dict[str, Any] = {name: frozenset({APPLE1}) for name in properties}
    game = kitchen(holding=APPLE1, **became)
    assert said(game, "examine apple 1") == text


def test_a_vessel_is_described_by_its_contents_whatever_became_of_it() -> None:
    game = kitchen(holding=BOWL, clean=frozenset({BOWL}))
    assert said(game, "examine bowl 1") == "This is a normal bowl 1. In it, you see nothing."


def test_slicing_needs_a_knife_in_the_hand_and_the_object_at_the_place() -> None:
    game = kitchen()
    go = "go to countertop 1"
    assert said(game, go, "slice apple 1 with knife 1") == "Nothing happens."
    take = (go, "take knife 1 from countertop 1")
    assert said(game, *take, "slice apple 1 with knife 1") == (
        "You sliced the apple 1 with the knife 1."
    )
    assert said(game, *take, "go to shelf 1", "slice apple 1 with knife 1") == "Nothing happens."


def test_using_a_lamp_again_still_says_that_it_turns_on() -> None:
    game = kitchen()
    state, texts = play(game, "go to shelf 1", "use desklamp 1", "use desklamp 1")
    assert texts[1:] == ["You turn on the desklamp 1."] * 2
    assert (state.toggled, state.lit) == (frozenset({LAMP}), frozenset())


def test_looking_away_from_every_receptacle_shows_nothing() -> None:
    assert said(kitchen(), "look") == (
        "You are in the middle of a room. Looking quickly around you, you see nothing."
    )


def test_looking_beside_receptacles_shows_what_was_shifted_between_them() -> None:
    game = kitchen()
    shift = (
        "go to shelf 1",
        "take bowl 1 from shelf 1",
        "open drawer 1",
        "move bowl 1 to drawer 1",
    )
    assert said(game, "go to shelf 1", "look") == (
        "You are facing the drawer 1, and shelf 1. Next to it, you see nothing."
    )
    assert said(game, *shift, "look") == (
        "You are facing the drawer 1, and shelf 1. Next to it, you see a bowl 1."
    )
    back = ("take bowl 1 from drawer 1", "move bowl 1 to shelf 1")
    assert said(game, *shift, *back, "look").endswith("Next to it, you see a bowl 1.")


def test_an_object_in_two_receptacles_is_taken_from_one_of_them_only() -> None:
    game = kitchen()
    contents = list(game.start.contents)
    contents[DRAWER] = (BOWL, *contents[DRAWER])
    game = kitchen(contents=tuple(contents), opened=frozenset({DRAWER}))
    state, _ = play(game, "go to shelf 1", "take bowl 1 from shelf 1")
    assert BOWL in state.contents[DRAWER]
    assert BOWL not in state.contents[SHELF]


@pytest.mark.parametrize(
    ("task", "object_kind", "target_kind", "commands"),
    [
        ("put", "apple", "drawer", ["go to shelf 1", "open drawer 1", "move apple 1 to drawer 1"]),
        ("look", "apple", "desklamp", ["go to shelf 1", "use desklamp 1"]),
        (
            "clean",
            "apple",
            "shelf",
            [
                "go to sinkbasin 1",
                "clean apple 1 with sinkbasin 1",
                "go to shelf 1",
                "move apple 1 to shelf 1",
            ],
        ),
        (
            "heat",
            "apple",
            "shelf",
            [
                "go to microwave 1",
                "heat apple 1 with microwave 1",
                "go to shelf 1",
                "move apple 1 to shelf 1",
            ],
        ),
        (
            "cool",
            "apple",
            "shelf",
            [
                "go to fridge 1",
                "cool apple 1 with fridge 1",
                "go to shelf 1",
                "move apple 1 to shelf 1",
            ],
        ),
        (
            "two",
            "apple",
            "shelf",
            [
                "go to shelf 1",
                "move apple 1 to shelf 1",
                "go to countertop 1",
                "take apple 2 from countertop 1",
                "go to shelf 1",
                "move apple 2 to shelf 1",
            ],
        ),
    ],
)
def test_each_task_is_won_by_its_last_command_and_not_before(
    task: str, object_kind: str, target_kind: str, commands: list[str]
) -> None:
    game = kitchen(task, object_kind, target_kind)
    state, outcomes = engine.initial_state(game), []
    for command in ("go to countertop 1", "take apple 1 from countertop 1", *commands):
        state, text, reward, won = engine.step(game, state, command)
        assert text != engine.REFUSED
        outcomes.append((reward, won))
    assert outcomes == [(0, False)] * (len(commands) + 1) + [(1, True)]


def test_the_reward_stays_while_the_goal_does_and_goes_with_it() -> None:
    game = kitchen("put", "bowl", "shelf")
    state = engine.initial_state(game)
    rewards = []
    for command in ("look", "nonsense", "go to shelf 1", "take bowl 1 from shelf 1"):
        state, _, reward, _ = engine.step(game, state, command)
        rewards.append(reward)
    assert rewards == [1, 1, 1, 0]


def test_every_admissible_command_does_something() -> None:
    game = kitchen()
    state, _ = play(game, "go to countertop 1", "take knife 1 from countertop 1")
    for command in engine.admissible(game, state):
        assert engine.step(game, state, command)[1] != engine.REFUSED


def test_a_state_is_its_own_snapshot() -> None:
    game = kitchen()
    state, _ = play(game, "go to countertop 1")
    before = dataclasses.replace(state)
    after, _, _, _ = engine.step(game, state, "take apple 1 from countertop 1")
    assert state == before
    assert hash(state) == hash(before)
    assert after != state
    assert pickle.loads(pickle.dumps(after)) == after
    assert pickle.loads(pickle.dumps(game)) == game


def test_telling_states_apart_costs_microseconds() -> None:
    game = kitchen()
    state, _ = play(game, "go to countertop 1", "take apple 1 from countertop 1")
    started = time.perf_counter()
    for _ in range(1000):
        hash(dataclasses.replace(state))
    # Measured: a few microseconds each; the bound leaves room for a busy machine.
    assert (time.perf_counter() - started) / 1000 < 200e-6
