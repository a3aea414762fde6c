"""Makes household games from seeds: as many as wanted, each proven solvable.

A game is a function of (size, kind, seed) alone. First the room, the object of the task and where
it goes are drawn, then the furniture around them, then everything that only distracts. The
walkthrough is an expert's plan that was played to the win in the engine.
"""

from __future__ import annotations

import dataclasses
import random

from bpo_jax.environments.alfworld import engine
from bpo_jax.environments.alfworld.expert import plan
from bpo_jax.environments.alfworld.game import TASK_TYPES, Game, Object, Receptacle, State
from bpo_jax.environments.alfworld.goal import goal_for
from bpo_jax.environments.alfworld.household import (
    APPLIANCES,
    LAMP,
    OPENABLE,
    ROOMS,
    THINGS,
    Room,
    Thing,
)

KINDS = tuple(TASK_TYPES)
"""The six kinds of task: put, look, clean, heat, cool, two."""

_FEWEST, _MOST = 6, 25  # a kitchen's fixtures and two more; what every room's table can fill

_WORDINGS = {
    "put": ("put a {o} in {r}.", "put some {o} on {r}."),
    "look": ("look at {o} under the {r}.", "examine the {o} with the {r}."),
    "clean": ("put a clean {o} in {r}.", "clean some {o} and put it in {r}."),
    "heat": ("put a hot {o} in {r}.", "heat some {o} and put it in {r}."),
    "cool": ("put a cool {o} in {r}.", "cool some {o} and put it in {r}."),
    "two": ("put two {o} in {r}.", "find two {o} and put them in {r}."),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large a generated game is.

    Attributes:
      name: part of the games' ids.
      min_receptacles, max_receptacles: number of receptacles, both ends included.
      min_objects, max_objects: number of objects, those of the task included. Fewer where the
        receptacles drawn cannot hold that many.
      per_receptacle: most objects in one receptacle.

    Raises:
      ValueError: if a range is empty or out of bounds.
    """

    name: str
    min_receptacles: int
    max_receptacles: int
    min_objects: int
    max_objects: int
    per_receptacle: int

    def __post_init__(self) -> None:
        if not _FEWEST <= self.min_receptacles <= self.max_receptacles <= _MOST:
            raise ValueError(
                f"size {self.name!r}: expected {_FEWEST} <= min_receptacles <= max_receptacles <= "
                f"{_MOST}, got {self.min_receptacles} and {self.max_receptacles}"
            )
        if not 3 <= self.min_objects <= self.max_objects:
            raise ValueError(
                f"size {self.name!r}: expected 3 <= min_objects <= max_objects, "
                f"got {self.min_objects} and {self.max_objects}"
            )
        if self.per_receptacle < 2:
            raise ValueError(
                f"size {self.name!r}: expected per_receptacle >= 2, got {self.per_receptacle}"
            )


def _size(name: str, receptacles: tuple[int, int], objects: tuple[int, int], most: int) -> Size:
    return Size(
        name=name,
        min_receptacles=receptacles[0],
        max_receptacles=receptacles[1],
        min_objects=objects[0],
        max_objects=objects[1],
        per_receptacle=most,
    )


SIZES = {
    size.name: size
    for size in (
        _size("small", (6, 9), (5, 8), 2),
        _size("standard", (8, 12), (12, 20), 5),
        _size("large", (16, 25), (24, 40), 8),
    )
}


def size_named(size: str | Size) -> Size:
    """The size of that name, or `size` itself where it already is one.

    Raises:
      ValueError: if no size has the name.
    """
    if isinstance(size, Size):
        return size
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: expected one of {', '.join(SIZES)} or a Size")
    return SIZES[size]


def generate(seed: int, *, size: str | Size = "small", kind: str | None = None) -> Game:
    """The game of a seed.

    Args:
      seed: any integer from 0 up.
      size: a key of `SIZES`, or a `Size`.
      kind: one of `KINDS`; None takes them in turn, seed after seed.

    Returns:
      A solvable game with its walkthrough; its id is "generated/<size>/<kind>/<seed>".

    Raises:
      ValueError: if an argument is none of these.
    """
    size = size_named(size)
    if seed < 0:
        raise ValueError(f"expected a seed from 0 up, got {seed}")
    if kind is None:
        kind = KINDS[seed % len(KINDS)]
    if kind not in KINDS:
        raise ValueError(f"unknown kind of task {kind!r}: expected one of {', '.join(KINDS)}")
    name = f"generated/{size.name}/{kind}/{seed}"
    rng = random.Random(name)
    game = _draw(rng, name, size, kind)
    walkthrough = plan(game)
    state = engine.initial_state(game)
    for command in walkthrough:
        state, *_ = engine.step(game, state, command)
    if not engine.won(game, state):
        raise AssertionError(f"{name}: its plan does not win; this is a defect of the generator")
    return dataclasses.replace(game, walkthrough=tuple(walkthrough))


def _draw(rng: random.Random, name: str, size: Size, kind: str) -> Game:
    """Draws a game without its walkthrough."""
    room, thing, target = _draw_task(rng, kind)
    furniture = _draw_furniture(rng, size, kind, room, thing, target)
    house = _House(rng, size, furniture)
    for _ in range(2 if kind == "two" else 1):
        house.put(thing, avoid=target)
    if kind == "look":
        house.put(THINGS[LAMP])
    if rng.random() < 0.25:  # one more of the kind; of no use to "put" if it already lies there
        house.put(thing, avoid=target if kind in ("put", "two") else None)
    others = sorted(
        other.name
        for other in THINGS.values()
        if room.name in other.rooms and other.name not in (thing.name, LAMP)
    )
    wanted = rng.randint(size.min_objects, size.max_objects)
    for other in rng.choices(others, k=max(0, wanted - len(house.placed))):
        house.put(THINGS[other])
    wording = rng.choice(_WORDINGS[kind])
    return house.game(
        id=name,
        task=kind,
        text=wording.format(o=thing.name.lower(), r=target.lower()),
        object_kind=thing.name.lower(),
        target_kind=target.lower(),
    )


def _draw_task(rng: random.Random, kind: str) -> tuple[Room, Thing, str]:
    """The room, the type of object, and the receptacle type it goes to (for "look": the lamp)."""
    appliance = APPLIANCES.get(kind)
    ability = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}.get(kind)
    rooms = [
        room
        for room in ROOMS.values()
        if (appliance is None or appliance in room.always)
        and (kind != "look" or room.name in THINGS[LAMP].rooms)
    ]
    room = rng.choice(rooms)
    choices = [
        thing
        for thing in THINGS.values()
        if room.name in thing.rooms
        and thing.name != LAMP
        and (ability is None or getattr(thing, ability))
    ]
    thing = rng.choice(choices)
    if kind == "look":
        return room, thing, LAMP
    targets = [place for place in thing.homes if room.holds(place) and place != appliance]
    return room, thing, rng.choice(targets)


def _draw_furniture(
    rng: random.Random, size: Size, kind: str, room: Room, thing: Thing, target: str
) -> list[str]:
    """The types of the receptacles; those that the task cannot do without come first."""
    furniture = list(room.always)

    def need(places: list[str], weights: list[int] | None = None) -> None:
        if not any(place in furniture for place in places):
            furniture.append(rng.choices(places, weights)[0])

    if kind == "look":
        lamp = THINGS[LAMP].homes
        need([place for place in lamp if room.holds(place)])
    else:
        need([target])
    homes = [place for place in thing.homes if room.holds(place) and place != target]
    need(homes, [thing.homes[place] for place in homes])
    pool = [place for place, most in room.maybe.items() for _ in range(most)]
    for place in furniture:
        if place in pool:
            pool.remove(place)
    rng.shuffle(pool)
    return (
        furniture + pool[: rng.randint(size.min_receptacles, size.max_receptacles) - len(furniture)]
    )


class _House:
    """Receptacles that are being filled."""

    def __init__(self, rng: random.Random, size: Size, furniture: list[str]) -> None:
        self._rng = rng
        self._size = size
        # A game lists things by type, and within a type from the highest number down.
        self._furniture = sorted(furniture, key=str.lower)
        self._held = [0] * len(furniture)
        self.placed: list[tuple[str, int]] = []  # type of object, index of receptacle

    def put(self, thing: Thing, avoid: str | None = None) -> None:
        """Puts one such thing where one might look for it; nowhere if nothing has room."""
        free = [
            index
            for index, place in enumerate(self._furniture)
            if place in thing.homes
            and place != avoid
            and self._held[index] < self._size.per_receptacle
        ]
        if not free:
            return
        # The weight is the type's: three drawers are not searched three times as gladly as one.
        weights = [
            thing.homes[self._furniture[index]] / self._furniture.count(self._furniture[index])
            for index in free
        ]
        index = self._rng.choices(free, weights)[0]
        self._held[index] += 1
        self.placed.append((thing.name, index))

    def game(self, *, id: str, task: str, text: str, object_kind: str, target_kind: str) -> Game:
        """The finished game, every receptacle at a place of its own."""
        self._rng.shuffle(self.placed)
        placed = sorted(self.placed, key=lambda pair: pair[0].lower())
        objects = []
        for (name, _), number in zip(placed, _numbers([n for n, _ in placed]), strict=True):
            thing = THINGS[name]
            objects.append(
                Object(
                    name=f"{name.lower()} {number}",
                    kind=name.lower(),
                    pickupable=name != LAMP,
                    toggleable=name == LAMP,
                    cleanable=thing.cleanable,
                    heatable=thing.heatable,
                    coolable=thing.coolable,
                    sliceable=thing.sliceable,
                    vessel=thing.is_container,
                )
            )
        count = len(self._furniture)
        receptacles = tuple(
            Receptacle(
                name=f"{place.lower()} {number}",
                kind=place.lower(),
                place=index,
                openable=place in OPENABLE,
            )
            for index, (place, number) in enumerate(
                zip(self._furniture, _numbers(self._furniture), strict=True)
            )
        )
        contents: list[list[int]] = [[] for _ in range(count)]
        for index, (_, where) in enumerate(placed):
            contents[where].append(index)
        names = {name for name, _ in placed} - {LAMP}
        accepts = frozenset(
            (place.lower(), name.lower())
            for name in names
            for place in self._furniture
            if place in THINGS[name].homes
        )
        return Game(
            id=id,
            task=task,
            text=text,
            object_kind=object_kind,
            target_kind=target_kind,
            goal=goal_for(task=task, object_kind=object_kind, target_kind=target_kind),
            receptacles=receptacles,
            objects=tuple(objects),
            accepts=accepts,
            places=count + 1,
            start=State(
                place=count,
                contents=tuple(map(tuple, contents)),
                lying=frozenset((index, where) for index, (_, where) in enumerate(placed)),
            ),
        )


def _numbers(types: list[str]) -> list[int]:
    """Numbers within each type, counting down: [a, b, b] -> [1, 2, 1]."""
    left = {name: types.count(name) for name in types}
    numbers = []
    for name in types:
        numbers.append(left[name])
        left[name] -= 1
    return numbers
