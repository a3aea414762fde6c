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
