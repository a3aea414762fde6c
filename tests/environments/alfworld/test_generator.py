"""Generated games: solvable, varied, and a function of (size, kind, seed)."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.environments.alfworld import engine, loader
from bpo_jax.environments.alfworld.generator import KINDS, SIZES, Size, generate
from bpo_jax.environments.alfworld.household import ROOMS, THINGS
from bpo_jax.environments.alfworld.writer import folder_of, to_tw_pddl

SEEDS = st.integers(0, 2**60)
SIZE_NAMES = st.sampled_from(sorted(SIZES))


def _play(game, commands):
    state, won = game.start, False
    for command in commands:
        state, text, _, won = engine.step(game, state, command)
        assert text != engine.REFUSED, command
    return won


@given(SEEDS, SIZE_NAMES, st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_walkthrough_wins_with_its_last_command(seed, size, kind):
    game = generate(seed, size=size, kind=kind)
    assert not engine.won(game, game.start)
    assert _play(game, game.walkthrough)
    assert not _play(game, game.walkthrough[:-1])


@given(SEEDS, SIZE_NAMES)
@settings(max_examples=30, deadline=None)
def test_size_bounds_receptacles_and_objects(seed, size):
    game, bounds = generate(seed, size=size), SIZES[size]
    assert bounds.min_receptacles <= len(game.receptacles) <= bounds.max_receptacles
    assert len(game.objects) <= bounds.max_objects
    assert max(map(len, game.start.contents)) <= bounds.per_receptacle


@given(SEEDS, SIZE_NAMES)
@settings(max_examples=30, deadline=None)
def test_things_lie_only_where_they_may_be_kept(seed, size):
    game = generate(seed, size=size)
    for receptacle, inside in zip(game.receptacles, game.start.contents, strict=True):
        for index in inside:
            thing = game.objects[index]
            assert not thing.pickupable or (receptacle.kind, thing.kind) in game.accepts


def test_game_is_a_function_of_its_seed():
    assert generate(7) == generate(7)
    assert generate(7) != generate(7 + len(KINDS))


def test_kind_taken_in_turn_is_the_same_game_as_the_kind_asked_for():
    for seed, kind in enumerate(KINDS):
        assert generate(seed) == generate(seed, kind=kind)


def test_seeds_give_different_first_observations():
    seen = {engine.first_observation(generate(seed)) for seed in range(200)}
    assert len(seen) > 190


def test_every_room_occurs_and_some_receptacles_are_closed():
    receptacles = [item for seed in range(60) for item in generate(seed).receptacles]
    assert {"fridge", "bed", "toilet", "sofa"} <= {item.kind for item in receptacles}
    assert {item.kind for item in receptacles if item.openable} >= {"fridge", "drawer", "safe"}


def test_every_thing_has_two_homes_in_each_of_its_rooms():
    # A task needs a place to bring the thing to, and another one to find it in.
    for thing in THINGS.values():
        for room in thing.rooms:
            homes = [place for place in thing.homes if ROOMS[room].holds(place)]
            assert len(homes) >= 2, (thing.name, room)


def test_room_tables_can_fill_the_largest_size():
    for room in ROOMS.values():
        assert len(room.always) + sum(room.maybe.values()) >= 25, room.name


def test_own_size():
    size = Size(
        name="tiny",
        min_receptacles=6,
        max_receptacles=6,
        min_objects=3,
        max_objects=3,
        per_receptacle=2,
    )
    game = generate(1, size=size)
    assert len(game.receptacles) == 6
    assert game.id == "generated/tiny/look/1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "expected a seed from 0 up, got -1"),
        ({"seed": 0, "size": "huge"}, "unknown size 'huge': expected one of small"),
        ({"seed": 0, "kind": "slice"}, "unknown kind of task 'slice': expected one of put"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_receptacles": 3}, "min_receptacles <= max_receptacles"),
        ({"max_receptacles": 40}, "got 6 and 40"),
        ({"min_objects": 9, "max_objects": 8}, "got 9 and 8"),
        ({"per_receptacle": 1}, "per_receptacle >= 2, got 1"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SIZES["small"], **change)


@pytest.mark.parametrize("seed", range(12))
def test_file_of_a_game_is_read_back_to_the_same_game(seed, tmp_path):
    game = generate(seed, size=("small", "large")[seed % 2])
    path = tmp_path / "train" / folder_of(game) / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_tw_pddl(game)))
    read = loader.load_game(path)
    assert dataclasses.replace(read, id=game.id) == game


def test_names_that_a_reader_would_not_give_are_refused():
    game = generate(0)
    items = list(game.receptacles)
    items[0] = dataclasses.replace(items[0], name=f"{items[0].kind} 9")
    with pytest.raises(ValueError, match="names count down within a kind"):
        to_tw_pddl(dataclasses.replace(game, receptacles=tuple(items)))
