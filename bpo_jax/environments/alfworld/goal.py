"""Goals: conjunctions of "there are such objects and receptacles" over a game's facts.

Official games state their goals in PDDL, as nested existential quantifiers over conjunctions. Each
outermost quantifier becomes one `Exists`; a play is won when every one of them holds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bpo_jax.environments.alfworld.game import Game, State

SORTS = ("object", "receptacle", "agent", "location")

QUALITIES: dict[str, tuple[str, str]] = {
    "clean": ("cleanable", "isclean"),
    "heat": ("heatable", "ishot"),
    "cool": ("coolable", "iscool"),
}
"""For each task that changes an object: what the object must allow, and what must become of it."""

_ABILITIES = {
    "pickupable": "pickupable",
    "toggleable": "toggleable",
    "heatable": "heatable",
    "coolable": "coolable",
    "cleanable": "cleanable",
    "sliceable": "sliceable",
    "isreceptacleobject": "vessel",
}
_PROPERTIES = {
    "isclean": "clean",
    "ishot": "hot",
    "iscool": "cool",
    "istoggled": "toggled",
    "ison": "lit",
    "issliced": "sliced",
}
_TYPED = ("objecttype", "receptacletype")
_FIXED = (*_TYPED, *_ABILITIES, "openable")
ARITY: dict[str, tuple[str, ...]] = {
    **{name: ("object",) for name in (*_ABILITIES, *_PROPERTIES)},
    "objecttype": ("object", "kind"),
    "receptacletype": ("receptacle", "kind"),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
    "atlocation": ("agent", "location"),
    "inreceptacle": ("object", "receptacle"),
    "objectatlocation": ("object", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "!=": ("any", "any"),
}
"""The predicates a goal may use, with the sort of each argument."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exists:
    """There is a choice of the variables for which every literal holds.

    Attributes:
      variables: (name, sort) pairs, sorts as in `SORTS`.
      literals: (predicate, argument, ...) in lower case, predicates as in `ARITY`; an argument is a
        variable's name or, for the two type predicates, a kind such as "drawer".
    """

    variables: tuple[tuple[str, str], ...]
    literals: tuple[tuple[str, ...], ...]


def place_goal(
    *, object_kind: str, receptacle_kind: str, quality: str | None = None, count: int = 1
) -> tuple[Exists, ...]:
    """`count` different objects of a kind, each with the quality, in one receptacle of a kind.

    Args:
      object_kind: such as "mug".
      receptacle_kind: such as "desk".
      quality: None or a key of `QUALITIES`.
      count: how many objects.
    """
    names = [f"?o{n}" for n in range(1, count + 1)]
    literals: list[tuple[str, ...]] = [("receptacletype", "?r", receptacle_kind)]
    for index, name in enumerate(names):
        literals += [("objecttype", name, object_kind), ("inreceptacle", name, "?r")]
        literals += [(predicate, name) for predicate in QUALITIES.get(quality or "", ())]
        literals += [("!=", other, name) for other in names[:index]]
    variables = (("?r", "receptacle"), *((name, "object") for name in names))
    return (Exists(variables=variables, literals=tuple(literals)),)


def look_goal(*, object_kind: str, lamp_kind: str) -> tuple[Exists, ...]:
    """Hold an object of a kind at the place of a lamp of a kind that has been used."""
    lamp = Exists(
        variables=(
            ("?lamp", "object"),
            ("?r", "receptacle"),
            ("?a", "agent"),
            ("?l", "location"),
        ),
        literals=(
            ("objecttype", "?lamp", lamp_kind),
            ("toggleable", "?lamp"),
            ("istoggled", "?lamp"),
            ("receptacleatlocation", "?r", "?l"),
            ("atlocation", "?a", "?l"),
            ("inreceptacle", "?lamp", "?r"),
        ),
    )
    held = Exists(
        variables=(("?o", "object"), ("?a", "agent")),
        literals=(("objecttype", "?o", object_kind), ("holds", "?a", "?o")),
    )
    return lamp, held


def goal_for(*, task: str, object_kind: str, target_kind: str) -> tuple[Exists, ...]:
    """The goal of one of the six task types ("put", "look", "clean", "heat", "cool", "two")."""
    if task == "look":
        return look_goal(object_kind=object_kind, lamp_kind=target_kind)
    return place_goal(
        object_kind=object_kind,
        receptacle_kind=target_kind,
        quality=task if task in QUALITIES else None,
        count=2 if task == "two" else 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """One part of a goal, made ready for one game.

    Attributes:
      candidates: for each variable what it can stand for, by what never changes in that game.
      checks: for each variable the literals that can be checked once it and those before it are
        chosen, leaving out those that never change.
    """

    candidates: tuple[tuple[str, tuple[int, ...]], ...]
    checks: tuple[tuple[tuple[str, ...], ...], ...]


def prepare(game: Game) -> tuple[Search, ...]:
    """The parts of a game's goal with everything settled that play cannot change."""
    return tuple(_prepare(game, part) for part in game.goal)


def _prepare(game: Game, part: Exists) -> Search:
    sizes = {
        "object": len(game.objects),
        "receptacle": len(game.receptacles),
        "location": game.places,
        "agent": 1,
    }
    candidates = []
    settled: set[tuple[str, ...]] = set()
    for name, sort in part.variables:
        fixed = [one for one in part.literals if one[0] in _FIXED and one[1] == name]
        settled.update(fixed)
        fitting = (
            value
            for value in range(sizes[sort])
            if all(_true(game, game.start, literal, {name: value}) for literal in fixed)
        )
        candidates.append((name, tuple(fitting)))
    # Few candidates first: most searches then end early.
    candidates.sort(key=lambda pair: len(pair[1]))
    open_literals = [literal for literal in part.literals if literal not in settled]
    checks = []
    bound: set[str] = set()
    for name, _ in candidates:
        bound.add(name)
        ready = [one for one in open_literals if bound.issuperset(one[1:])]
        open_literals = [one for one in open_literals if one not in ready]
        checks.append(tuple(ready))
    return Search(candidates=tuple(candidates), checks=tuple(checks))


def achieved(game: Game, state: State) -> bool:
    """Whether every part of the game's goal holds in a state."""
    return all(_found(game, state, search, 0, {}) for search in game.goal_search)


def _found(game: Game, state: State, search: Search, depth: int, chosen: dict[str, int]) -> bool:
    """Whether the variables from `depth` on can be chosen too, given those before."""
    if depth == len(search.candidates):
        return True
    name, values = search.candidates[depth]
    checks = search.checks[depth]
    for value in values:
        chosen[name] = value
        for literal in checks:
            if not _true(game, state, literal, chosen):
                break
        else:
            if _found(game, state, search, depth + 1, chosen):
                return True
    return False


def _true(game: Game, state: State, literal: tuple[str, ...], chosen: dict[str, int]) -> bool:
    """The truth of one literal whose variables have all been chosen."""
    predicate = literal[0]
    first = chosen[literal[1]]
    if len(literal) == 2 or predicate in _TYPED:
        if predicate in _PROPERTIES:
            return first in getattr(state, _PROPERTIES[predicate])
        if predicate in _ABILITIES:
            return bool(getattr(game.objects[first], _ABILITIES[predicate]))
        if predicate == "objecttype":
            return game.objects[first].kind == literal[2]
        if predicate == "receptacletype":
            return game.receptacles[first].kind == literal[2]
        if predicate == "openable":
            return game.receptacles[first].openable
        if predicate == "opened":
            return first in state.opened
        return state.holding is not None
    second = chosen[literal[2]]
    if predicate == "inreceptacle":
        return first in state.contents[second]
    if predicate == "holds":
        return state.holding == second
    if predicate == "atlocation":
        return state.place == second
    if predicate == "receptacleatlocation":
        return game.receptacles[first].place == second
    if predicate == "objectatlocation":
        return (first, second) in state.lying
    return first != second
