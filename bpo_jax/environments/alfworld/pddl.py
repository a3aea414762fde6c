"""Reading the PDDL of official ALFWorld games, and checking that its actions are ours.

The engine plays the rules natively. So that it never plays a game whose rules are others, every
action of a game's domain is compared, as a structure, with the one the engine implements: by a
fingerprint of its parameters, precondition and effect. Only what kinds of receptacle clean, heat
and cool, and what kinds of object slice, is read from the domain instead.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from typing import Any

Node = str | list[Any]
"""A PDDL expression: a word, or a list of expressions."""


class Unsupported(ValueError):
    """The text is not what the engine plays; the message says what differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds:
    """Which kinds of receptacle or object serve an action, as read from a domain."""

    cleaners: frozenset[str]
    heaters: frozenset[str]
    coolers: frozenset[str]
    cutters: frozenset[str]


_ACTIONS = {
    "look": "c5001e4dd3ee0792",
    "inventory": "ec4138a9b7d27fac",
    "examinereceptacle": "a0631b439aa7ca8f",
    "examineobject": "d8ca3f5fba2a25cb",
    "gotolocation": "7fcc14a8bde83368",
    "openobject": "7e65ce549bef676c",
    "closeobject": "b8ae58994e452cc0",
    "pickupobject": "d40e33a984174948",
    "putobject": "f6d6270041400da7",
    "cleanobject": "348e78ce6812e425",
    "heatobject": "15f442ef3f639a21",
    "coolobject": "3d3283f4e67e0ded",
    "toggleobject": "f3e4427d2c60d990",
    "sliceobject": "3663c11440eae09c",
    "help": "ec4138a9b7d27fac",
}
"""The actions the engine implements: fingerprints of their definitions."""

_KINDS_OF = {
    "cleanobject": "cleaners",
    "heatobject": "heaters",
    "coolobject": "coolers",
    "sliceobject": "cutters",
}
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


def parse(text: str) -> list[Any]:
    """The first expression of a text as nested lists of lower-case words, without comments.

    Raises:
      Unsupported: the parentheses do not match.
    """
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise Unsupported("a closing parenthesis too many")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) != 1 or not stack[0] or not isinstance(stack[0][0], list):
        raise Unsupported("it is cut short: a parenthesis is never closed")
    return stack[0][0]


def sections(tree: list[Any]) -> dict[str, list[Any]]:
    """The parts of a `define` form by their keyword, such as ":init"."""
    return {part[0]: part[1:] for part in tree[1:] if isinstance(part, list) and part}


def typed(words: list[str]) -> list[tuple[str, str]]:
    """The (name, type) pairs of a PDDL list such as `a b - object c - location`."""
    pairs: list[tuple[str, str]] = []
    waiting: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "-":
            sort = next(rest, "")
            pairs += [(name, sort) for name in waiting]
            waiting = []
        else:
            waiting.append(word)
    return pairs + [(name, "object") for name in waiting]


def kind(word: str) -> str:
    """A type constant such as "drawertype" without its suffix."""
    return word.removesuffix("type")


def digest(value: Any) -> str:
    """A short fingerprint of a JSON-ready value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def check_domain(text: str) -> Kinds:
    """Compare a domain with the one the engine implements.

    Args:
      text: the PDDL domain.

    Returns:
      What serves to clean, heat, cool and slice there.

    Raises:
      Unsupported: an action differs, is missing or is unknown.
    """
    actions = {
        part[1]: part[2:] for part in parse(text) if isinstance(part, list) and part[0] == ":action"
    }
    found: dict[str, frozenset[str]] = {}
    for name, body in actions.items():
        if name not in _ACTIONS:
            raise Unsupported(f"its domain has an action {name!r} that the engine does not know")
        if name in _KINDS_OF:
            body, found[_KINDS_OF[name]] = _without_kinds(name, body)
        if digest(body) != _ACTIONS[name]:
            raise Unsupported(f"the action {name!r} of its domain is not the one the engine plays")
    if missing := sorted(_ACTIONS.keys() - actions.keys()):
        raise Unsupported(f"its domain lacks the action {missing[0]!r}")
    return Kinds(**found)


def _without_kinds(name: str, body: list[Any]) -> tuple[list[Any], frozenset[str]]:
    """An action without its choice of kinds, and that choice."""
    at = body.index(":precondition") + 1 if ":precondition" in body else len(body)
    condition = body[at] if at < len(body) else []
    kinds: set[str] = set()
    rest: list[Any] = []
    for part in condition:
        choice = part[1:] if isinstance(part, list) and part and part[0] == "or" else None
        if choice and all(len(one) == 3 and one[0].endswith("type") for one in choice):
            kinds |= {kind(one[2]) for one in choice}
            rest.append(["one of", sorted({one[0] + one[1] for one in choice})])
        else:
            rest.append(part)
    if not kinds:
        raise Unsupported(f"the action {name!r} of its domain names no kinds")
    return [*body[:at], rest, *body[at + 1 :]], frozenset(kinds)
