"""Official ALFWorld games: finding the files and reading one into a `Game`.

`alfworld-download` (from the `alfworld` package, 0.4 or newer) puts the games under a folder which
`ALFWORLD_DATA` names: `json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/game.tw-pddl`,
each a JSON object with a PDDL domain, a text grammar, a PDDL problem and a walkthrough.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from bpo_jax.environments.alfworld import grammar, pddl
from bpo_jax.environments.alfworld.game import TASK_TYPES, Game, Object, Receptacle, Rules, State
from bpo_jax.environments.alfworld.goal import ARITY, SORTS, Exists
from bpo_jax.environments.alfworld.pddl import Unsupported

SPLITS = ("train", "valid_seen", "valid_unseen")
GAME_FILE = "game.tw-pddl"
NEEDED = "the game files of release 2.1.2 or newer, which `alfworld-download` of alfworld>=0.4 gets"

_KEYS = ("pddl_domain", "grammar", "pddl_problem", "walkthrough", "solvable")
_UNSOLVABLE = re.compile(rb'"solvable"\s*:\s*false')
_SORT_OF_FIRST = {
    **dict.fromkeys(("objecttype", "inreceptacle", "objectatlocation"), "object"),
    **dict.fromkeys(("receptacletype", "receptacleatlocation", "openable", "opened"), "receptacle"),
}
_UNUSED = frozenset(
    ("wasinreceptacle", "checked", "examined", "full", "moveable", "isreceptacleobjectfull", "=")
)
"""Facts that some problems state and no rule, text or goal asks for."""

_SPELLED = (("_bar_", "|"), ("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ","))


class GameFileError(ValueError):
    """A game or its folder cannot be used; the message names it and says what is needed."""

    one_line = True  # the message says everything; a traceback would only hide it


def data_folder(data: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The folder that holds `json_2.1.1`: `data`, or else what `ALFWORLD_DATA` says.

    Raises:
      GameFileError: neither is given, or there is no such folder.
    """
    chosen = data or os.environ.get("ALFWORLD_DATA")
    if not chosen:
        raise GameFileError(
            "no ALFWorld data: run `alfworld-download` (pip install alfworld) and set "
            "ALFWORLD_DATA to its folder, the one that holds json_2.1.1"
        )
    folder = pathlib.Path(chosen).expanduser()
    if not (folder / "json_2.1.1").is_dir():
        raise GameFileError(
            f"{folder} holds no folder json_2.1.1: run `alfworld-download` or mend ALFWORLD_DATA"
        )
    return folder


def find_games(split: str, data: str | os.PathLike[str] | None = None) -> list[pathlib.Path]:
    """The game files of a split in a fixed order, without those the benchmark leaves out.

    Left out are, as in the original environment, tasks with movable receptacles or sliced objects
    and games marked unsolvable.

    Args:
      split: one of `SPLITS`.
      data: the folder that holds `json_2.1.1`; by default `ALFWORLD_DATA`.

    Raises:
      GameFileError: there is no such folder, or no game in it.
    """
    if split not in SPLITS:
        raise GameFileError(f"no ALFWorld split {split!r}; there are {', '.join(SPLITS)}")
    folder = data_folder(data) / "json_2.1.1" / split
    found = [
        path
        for path in sorted(folder.glob(f"*/*/{GAME_FILE}"))
        if path.is_file()
        and not any(word in str(path.parent.relative_to(folder)) for word in ("movable", "Sliced"))
        and not _UNSOLVABLE.search(path.read_bytes())
    ]
    if not found:
        raise GameFileError(
            f"no {GAME_FILE} under {folder}: run `alfworld-download` to get {NEEDED}"
        )
    return found


def load_game(path: str | os.PathLike[str]) -> Game:
    """Read one official game.

    Args:
      path: a `game.tw-pddl` in its folder `<split>/<task>/<trial>`; its task type is taken from
        there.

    Raises:
      GameFileError: the file cannot be read, or it is not a game that the engine plays exactly.
    """
    path = pathlib.Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GameFileError(f"cannot read {path}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise GameFileError(
            f"{path} is not whole JSON ({error}); fetch it again: needed are {NEEDED}"
        ) from error
    missing = [key for key in _KEYS if not isinstance(data, dict) or key not in data]
    if missing:
        raise GameFileError(f"{path} lacks {', '.join(missing)}; needed are {NEEDED}")
    try:
        return _read(data, path)
    except Unsupported as error:
        raise GameFileError(f"{path} cannot be played: {error}; needed are {NEEDED}") from error
    except (
        AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise GameFileError(
            f"{path} cannot be played: its PDDL or grammar is malformed ({error!r}); "
            f"needed are {NEEDED}"
        ) from error


def _read(data: dict[str, Any], path: pathlib.Path) -> Game:
    """The game in a file's JSON object."""
    if not all(isinstance(data[key], str) for key in ("pddl_domain", "grammar", "pddl_problem")):
        raise Unsupported("its domain, grammar and problem are not all texts")
    walkthrough = data["walkthrough"] or []
    if not isinstance(walkthrough, list) or not all(isinstance(one, str) for one in walkthrough):
        raise Unsupported("its walkthrough is no list of commands")
    kinds = pddl.check_domain(data["pddl_domain"])
    text, shared = grammar.read_task(data["grammar"])
    commands, answer = grammar.check_grammar(shared)
    parts = pddl.sections(pddl.parse(data["pddl_problem"]))
    for section in (":objects", ":init", ":goal"):
        if section not in parts:
            raise Unsupported(f"its problem has no {section}")
    world = _World(parts[":objects"], parts[":init"])
    goal = tuple(_goal(part) for part in _conjuncts(parts[":goal"]))
    object_kind, target_kind = _kinds_of(goal)
    return Game(
        id="/".join(path.parts[-4:-1]),
        task=_task(path),
        text=text,
        object_kind=object_kind,
        target_kind=target_kind,
        goal=goal,
        receptacles=world.receptacles(),
        objects=world.objects(),
        accepts=frozenset(
            (pddl.kind(receptacle), pddl.kind(thing))
            for receptacle, thing in world.facts["cancontain"]
        ),
        places=len(world.place),
        start=world.start(),
        walkthrough=tuple(walkthrough) or None,
        rules=Rules(commands=commands, help=answer, **dataclasses.asdict(kinds)),
    )


def _task(path: pathlib.Path) -> str:
    """The task type, from the name of the folder that holds the trials of a task."""
    folder = path.parent.parent.name
    for short, prefix in TASK_TYPES.items():
        if folder.split("-")[0] == prefix:
            return short
    raise Unsupported(f"its folder {folder!r} begins with none of {', '.join(TASK_TYPES.values())}")


class _World:
    """The entities and facts of a problem, numbered in the order in which the game lists them.

    TextWorld sorts what it lists by identifier, so that order is the numbering. Names count the
    entities of a kind downwards: of three drawers the first is "drawer 3".
    """

    def __init__(self, declared: list[str], init: list[Any]) -> None:
        self.facts: dict[str, list[tuple[str, ...]]] = collections.defaultdict(list)
        for fact in init:
            if not isinstance(fact, list) or not fact:
                raise Unsupported(f"its problem starts with {fact!r}, which is no fact")
            if fact[0] not in _UNUSED and fact[0] != "not":
                self.facts[fact[0]].append(tuple(fact[1:]))
        self._check()
        sort_of = dict(pddl.typed(declared))
        used = {name for rows in self.facts.values() for row in rows for name in row}
        used |= {name for fact in init if fact[0] in _UNUSED - {"="} for name in fact[1:]}
        if unknown := sorted(used - sort_of.keys()):
            raise Unsupported(f"its problem does not declare {unknown[0]!r}")
        self.name = _names(used)
        self.thing = _number(name for name in used if sort_of[name] == "object")
        self.receptacle = _number(name for name in used if sort_of[name] == "receptacle")
        self.place = _number(name for name in used if sort_of[name] == "location")
        self._index = {"object": self.thing, "receptacle": self.receptacle, "location": self.place}

    def _check(self) -> None:
        """Refuse facts that the engine would not play."""
        known = {*ARITY, "cancontain", "inreceptacleobject"} - {"!="}
        for predicate, rows in self.facts.items():
            if predicate not in known:
                raise Unsupported(f"its problem states {predicate!r}, which the engine ignores")
            arity = len(ARITY.get(predicate, ("", "")))
            if any(len(row) != arity for row in rows):
                raise Unsupported(f"its problem states {predicate!r} without {arity} arguments")
        if len(self.facts["atlocation"]) != 1:
            raise Unsupported("its problem does not place exactly one agent")

    def _of(self, predicate: str) -> frozenset[int]:
        """The objects or receptacles a property is stated of."""
        numbers = self._index[_SORT_OF_FIRST.get(predicate, "object")]
        return frozenset(_find(numbers, row[0], predicate) for row in self.facts[predicate])

    def _pairs(self, predicate: str, second: dict[str, int]) -> set[tuple[int, int]]:
        """The pairs a relation is stated of."""
        first = self._index[_SORT_OF_FIRST.get(predicate, "object")]
        return {
            (_find(first, one, predicate), _find(second, other, predicate))
            for one, other in self.facts[predicate]
        }

    def _single(self, predicate: str) -> dict[str, str]:
        """A relation that gives every entity at most one partner."""
        partners: dict[str, str] = {}
        for one, other in self.facts[predicate]:
            if partners.setdefault(one, other) != other:
                raise Unsupported(f"its problem states {predicate!r} twice of {one!r}")
        return partners

    def receptacles(self) -> tuple[Receptacle, ...]:
        kinds, places = self._single("receptacletype"), self._single("receptacleatlocation")
        openable = self._of("openable")
        return tuple(
            Receptacle(
                name=self.name[key],
                kind=pddl.kind(kinds.get(key, "")),
                place=self.place[places[key]] if key in places else None,
                openable=index in openable,
            )
            for key, index in self.receptacle.items()
        )

    def objects(self) -> tuple[Object, ...]:
        kinds = self._single("objecttype")
        inner = self._pairs("inreceptacleobject", self.thing)
        abilities = {
            name: self._of(name)
            for name in (
                "pickupable",
                "toggleable",
                "heatable",
                "coolable",
                "cleanable",
                "sliceable",
            )
        }
        vessels = self._of("isreceptacleobject")
        return tuple(
            Object(
                name=self.name[key],
                kind=pddl.kind(kinds.get(key, "")),
                vessel=index in vessels,
                holds=tuple(sorted(one for one, outer in inner if outer == index and one != index)),
                **{name: index in having for name, having in abilities.items()},
            )
            for key, index in self.thing.items()
        )

    def start(self) -> State:
        contents: list[list[int]] = [[] for _ in self.receptacle]
        for thing, receptacle in sorted(self._pairs("inreceptacle", self.receptacle)):
            contents[receptacle].append(thing)
        held = {thing for _, thing in self.facts["holds"]}
        if len(held) > 1 or bool(held) != bool(self.facts["holdsany"]):
            raise Unsupported("its problem starts with hands that are both full and empty")
        return State(
            place=self.place[self.facts["atlocation"][0][1]],
            holding=self.thing[held.pop()] if held else None,
            contents=tuple(tuple(row) for row in contents),
            lying=frozenset(self._pairs("objectatlocation", self.place)),
            opened=self._of("opened"),
            clean=self._of("isclean"),
            hot=self._of("ishot"),
            cool=self._of("iscool"),
            toggled=self._of("istoggled"),
            lit=self._of("ison"),
            sliced=self._of("issliced"),
        )


def _number(names: Iterable[str]) -> dict[str, int]:
    """Numbers for names, in alphabetical order."""
    return {name: index for index, name in enumerate(sorted(names))}


def _find(numbers: dict[str, int], name: str, predicate: str) -> int:
    """An entity's number; an entity of another sort there is an error."""
    if name not in numbers:
        raise Unsupported(f"its problem states {predicate!r} of {name!r}, which is of another sort")
    return numbers[name]


def _names(identifiers: Iterable[str]) -> dict[str, str]:
    """What every entity is called, as the original environment derives it from the identifiers."""
    ordered = sorted(identifiers)
    bases: dict[str, str] = {}
    for identifier in ordered:
        text = identifier
        for spelled, sign in _SPELLED:
            text = text.replace(spelled, sign)
        base, bar, _ = text.partition("|")
        bases[identifier] = base + ("basin" if bar and "basin" in identifier else "")
    numbered = [identifier for identifier in ordered if "_bar_" in identifier]
    left = collections.Counter(bases[identifier] for identifier in numbered)
    # An identifier without coordinates gets no number, but the blank before it stays.
    names = {identifier: f"{base} " for identifier, base in bases.items()}
    for identifier in numbered:
        base = bases[identifier]
        names[identifier] = f"{base} {left[base]}"
        left[base] -= 1
    return names


def _conjuncts(parts: list[Any]) -> list[Any]:
    """The members of a conjunction, nested ones unfolded."""
    members: list[Any] = []
    for part in parts:
        if isinstance(part, list) and part and part[0] == "and":
            members += _conjuncts(part[1:])
        else:
            members.append(part)
    return members


def _goal(part: Any) -> Exists:
    """One part of a goal; quantifiers inside it join the outermost."""
    variables: dict[str, str] = {}
    literals: dict[tuple[str, ...], None] = {}

    def visit(node: Any) -> None:
        match node:
            case ["and", *members]:
                for member in members:
                    visit(member)
            case ["exists", list(declared), body]:
                for name, sort in pddl.typed(declared):
                    if name in variables:
                        raise Unsupported(f"its goal binds {name!r} twice")
                    if sort not in SORTS:
                        raise Unsupported(f"its goal asks for some {sort!r}")
                    variables[name] = sort
                visit(body)
            case ["not", ["=", str(one), str(other)]] if {one, other} <= variables.keys():
                literals["!=", one, other] = None
            case [str(predicate), *arguments] if all(isinstance(one, str) for one in arguments):
                literals[_literal(predicate, arguments, variables)] = None
            case _:
                raise Unsupported(f"its goal asks for {json.dumps(node)}")

    visit(part)
    return Exists(variables=tuple(variables.items()), literals=tuple(literals))


def _literal(predicate: str, arguments: list[str], variables: dict[str, str]) -> tuple[str, ...]:
    """One literal of a goal, checked against what the engine can evaluate."""
    sorts = ARITY.get(predicate, ())
    if len(sorts) != len(arguments) or not sorts:
        raise Unsupported(f"its goal asks for {predicate!r} of {len(arguments)}")
    words = []
    for word, sort in zip(arguments, sorts, strict=True):
        if sort != "kind" and variables.get(word) != sort:
            raise Unsupported(f"its goal asks for {predicate!r} of {word!r}, which is no {sort}")
        words.append(pddl.kind(word) if sort == "kind" else word)
    return (predicate, *words)


def _kinds_of(goal: tuple[Exists, ...]) -> tuple[str, str]:
    """The kind of object a goal is about, and the kind of receptacle or lamp it is brought to."""
    literals = [literal for part in goal for literal in part.literals]
    used = {literal[1] for literal in literals if literal[0] == "istoggled"}
    things = [one for one in literals if one[0] == "objecttype"]
    objects = [kind for _, name, kind in things if name not in used]
    lamps = [kind for _, name, kind in things if name in used]
    targets = lamps or [one[2] for one in literals if one[0] == "receptacletype"]
    if not objects or not targets:
        raise Unsupported("its goal names no kind of object, or nothing to bring it to")
    return objects[0], targets[0]
