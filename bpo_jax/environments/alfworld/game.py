"""What an ALFWorld game is: the parts that never change while playing, and the state that does.

A household of receptacles (drawers, fridges, ...) that stand at places, objects in them, a goal.
Entities are referred to by their index in `Game.receptacles` and `Game.objects`; that order is also
the order in which the game lists them in its texts, so it is part of the game.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bpo_jax.environments.alfworld.goal import Exists, Search, prepare

TASK_TYPES: dict[str, str] = {
    "put": "pick_and_place_simple",
    "look": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
"""The six task types: the short name used everywhere here, and the official folder prefix."""

COMMANDS: Mapping[str, str] = {
    "go": "go to {r}",
    "open": "open {r}",
    "close": "close {r}",
    "take": "take {o} from {r}",
    "put": "move {o} to {r}",
    "examine_receptacle": "examine {r}",
    "examine_object": "examine {o}",
    "use": "use {o}",
    "heat": "heat {o} with {r}",
    "clean": "clean {o} with {r}",
    "cool": "cool {o} with {r}",
    "slice": "slice {o} with {tool}",
    "look": "look",
    "inventory": "inventory",
    "help": "help",
}
"""How each action is spelt; `{r}` is a receptacle's name, `{o}` and `{tool}` are objects' names."""

HELP = """\
You can say:
  look                              what is around you
  inventory                         what you hold
  go to (receptacle)                walk to a receptacle
  open (receptacle)                 open it
  close (receptacle)                close it
  take (object) from (receptacle)   pick an object up
  move (object) to (receptacle)     put down what you hold
  examine (something)               look closely at a receptacle here, or at what you hold
  use (object)                      switch an object on
  heat (object) with (receptacle)   heat what you hold
  clean (object) with (receptacle)  clean what you hold
  cool (object) with (receptacle)   cool what you hold
  slice (object) with (object)      slice an object here with the knife you hold
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The few rules that are read from a game file instead of being fixed in the engine.

    Attributes:
      commands: spelling of every action, keys as in `COMMANDS`.
      help: what the command `help` answers.
      cleaners, heaters, coolers: kinds of receptacle that clean, heat and cool what is held.
      cutters: kinds of object that slice.
    """

    commands: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(COMMANDS))
    help: str = HELP
    cleaners: frozenset[str] = frozenset({"sink", "sinkbasin"})
    heaters: frozenset[str] = frozenset({"microwave"})
    coolers: frozenset[str] = frozenset({"fridge"})
    cutters: frozenset[str] = frozenset({"knife", "butterknife"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receptacle:
    """Something that holds objects.

    Attributes:
      name: shown and typed, unique in the game, such as "drawer 1".
      kind: its type in lower case, such as "drawer".
      place: where one stands to reach it; several may share a place. None: out of reach.
      openable: starts closed unless listed in `State.opened`, and hides its contents while closed.
    """

    name: str
    kind: str
    place: int | None
    openable: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Object:
    """Something that can be in a receptacle.

    Attributes:
      name: shown and typed, unique in the game, such as "mug 1".
      kind: its type in lower case, such as "mug".
      vessel: a bowl, pot or the like, which `examine` describes by its contents.
      holds: objects inside the vessel; play never changes them.
      pickupable, toggleable, heatable, coolable, cleanable, sliceable: what may be done to it.
    """

    name: str
    kind: str
    pickupable: bool = True
    toggleable: bool = False
    heatable: bool = False
    coolable: bool = False
    cleanable: bool = False
    sliceable: bool = False
    vessel: bool = False
    holds: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that play changes: a small immutable value, so it is its own snapshot.

    Attributes:
      place: where the agent stands.
      holding: the object in its hand.
      contents: for each receptacle the objects in it, by ascending index.
      lying: (object, place) pairs: where an object can be reached with a knife. The game keeps this
        apart from `contents`: an object taken elsewhere than where it lay still lies there.
      taken: (object, receptacle) pairs: taken from there and not put back there since.
      opened: receptacles that are open.
      clean, hot, cool, toggled, lit, sliced: objects with that property. `toggled` has been used at
        least once; `lit` is on at the moment.
    """

    place: int
    holding: int | None = None
    contents: tuple[tuple[int, ...], ...]
    lying: frozenset[tuple[int, int]] = frozenset()
    taken: frozenset[tuple[int, int]] = frozenset()
    opened: frozenset[int] = frozenset()
    clean: frozenset[int] = frozenset()
    hot: frozenset[int] = frozenset()
    cool: frozenset[int] = frozenset()
    toggled: frozenset[int] = frozenset()
    lit: frozenset[int] = frozenset()
    sliced: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Game:
    """One household with a task.

    Attributes:
      id: unique name; for an official game its folder, relative to the data.
      task: one of `TASK_TYPES`.
      text: the task in words, "put some mug on desk."; the first observation shows it.
      object_kind: the kind of object the task is about.
      target_kind: the kind of receptacle it goes to; for "look" the kind of lamp.
      goal: what must hold to win, all of it (see `goal.place_goal`, `goal.look_goal`).
      receptacles, objects: in the order in which the game lists them.
      accepts: (receptacle kind, object kind) pairs that `move` allows.
      places: how many places there are; a place is a number below it.
      start: the state a play begins in.
      walkthrough: commands that win from the start, where known.
      rules: spelling of the commands and the like.
    """

    id: str
    task: str
    text: str
    object_kind: str
    target_kind: str
    goal: tuple[Exists, ...]
    receptacles: tuple[Receptacle, ...]
    objects: tuple[Object, ...]
    accepts: frozenset[tuple[str, str]]
    places: int
    start: State
    walkthrough: tuple[str, ...] | None = None
    rules: Rules = dataclasses.field(default_factory=Rules)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what was derived from them is cheap to derive again."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def goal_search(self) -> tuple[Search, ...]:
        """The goal, made ready to be looked for in a state."""
        return prepare(self)

    @functools.cached_property
    def receptacles_at(self) -> tuple[tuple[int, ...], ...]:
        """For each place the receptacles that stand there."""
        at: list[list[int]] = [[] for _ in range(self.places)]
        for index, receptacle in enumerate(self.receptacles):
            if receptacle.place is not None:
                at[receptacle.place].append(index)
        return tuple(tuple(row) for row in at)

    @functools.cached_property
    def receptacle_index(self) -> dict[str, int]:
        """The index of each receptacle by name."""
        return {receptacle.name: index for index, receptacle in enumerate(self.receptacles)}

    @functools.cached_property
    def object_index(self) -> dict[str, int]:
        """The index of each object by name."""
        return {thing.name: index for index, thing in enumerate(self.objects)}
