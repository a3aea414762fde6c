"""Two players that win: a planner that knows everything, a searcher that knows what it has seen.

`plan` is the proof that a game can be won, and in how few turns. `Searcher` is who a policy is
cloned from: each of its commands follows from the texts seen so far (only the order in which it
looks into places is a matter of taste, and comes from its seed), so a model that reads the same
texts can learn to do the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator

from bpo_jax.environments.alfworld.engine import REFUSED
from bpo_jax.environments.alfworld.game import Game

_QUALITIES = {"clean": "clean", "heat": "hot", "cool": "cool"}


def plan(game: Game) -> list[str]:
    """A short winning sequence of commands, found with full knowledge of the game.

    It is the shortest of those that fetch an object, do to it what the task asks and bring it to
    its target, one object after the other.

    Raises:
      ValueError: if there is no such sequence.
    """
    if game.task == "look":
        plans = (walk.commands for walk in _plans_to_look(game))
    else:
        plans = (walk.commands for walk in _plans_to_place(game))
    best = min(plans, key=len, default=None)
    if best is None:
        raise ValueError(f"game {game.id}: no plan reaches its goal {game.text!r}")
    return list(best)


class _Walk:
    """A sequence of commands being written, and where it leads."""

    def __init__(self, game: Game) -> None:
        self._game = game
        self._place = game.start.place
        self._opened = set(game.start.opened)
        self.commands: list[str] = []

    def say(self, key: str, **names: str) -> None:
        self.commands.append(self._game.rules.commands[key].format(**names))

    def go(self, receptacle: int) -> None:
        item = self._game.receptacles[receptacle]
        if item.place is not None and item.place != self._place:
            self.say("go", r=item.name)
            self._place = item.place

    def reach_into(self, receptacle: int) -> None:
        self.go(receptacle)
        item = self._game.receptacles[receptacle]
        if item.openable and receptacle not in self._opened:
            self.say("open", r=item.name)
            self._opened.add(receptacle)

    def take(self, thing: int, receptacle: int) -> None:
        self.reach_into(receptacle)
        self._with("take", thing, receptacle)

    def put(self, thing: int, receptacle: int) -> None:
        self.reach_into(receptacle)
        self._with("put", thing, receptacle)

    def treat(self, key: str, thing: int, receptacle: int) -> None:
        self.go(receptacle)
        self._with(key, thing, receptacle)

    def use(self, thing: int, receptacle: int) -> None:
        self.go(receptacle)
        self.say("use", o=self._game.objects[thing].name)

    def _with(self, key: str, thing: int, receptacle: int) -> None:
        self.say(key, o=self._game.objects[thing].name, r=self._game.receptacles[receptacle].name)


def _found(game: Game, wanted: Callable[[int], bool]) -> list[tuple[int, int]]:
    """(object, receptacle) of the wanted objects that can be walked to."""
    return [
        (thing, receptacle)
        for receptacle, inside in enumerate(game.start.contents)
        if game.receptacles[receptacle].place is not None
        for thing in inside
        if wanted(thing)
    ]


def _of_task(game: Game) -> list[tuple[int, int]]:
    """Where the objects of the task's kind are that can be picked up."""

    def wanted(thing: int) -> bool:
        item = game.objects[thing]
        return item.pickupable and item.kind == game.object_kind

    return _found(game, wanted)


def _plans_to_look(game: Game) -> Iterator[_Walk]:
    lamps = _found(
        game,
        lambda thing: (
            game.objects[thing].kind == game.target_kind and game.objects[thing].toggleable
        ),
    )
    for thing, home in _of_task(game):
        for lamp, stand in lamps:
            walk = _Walk(game)
            walk.take(thing, home)
            walk.use(lamp, stand)
            yield walk


def _plans_to_place(game: Game) -> Iterator[_Walk]:
    quality = _QUALITIES.get(game.task)
    appliances: Iterable[int | None] = _appliances(game) if quality else (None,)
    things = _of_task(game)
    if quality:
        ability = {"clean": "cleanable", "hot": "heatable", "cool": "coolable"}[quality]
        things = [pair for pair in things if getattr(game.objects[pair[0]], ability)]
    for target, item in enumerate(game.receptacles):
        if item.kind != game.target_kind or item.place is None:
            continue
        if game.task == "two":
            yield from _plans_for_two(game, target, things)
            continue
        if (item.kind, game.object_kind) not in game.accepts:
            continue
        for thing, home in things:
            for appliance in appliances:
                walk = _Walk(game)
                walk.take(thing, home)
                if appliance is not None and thing not in getattr(game.start, quality or ""):
                    walk.treat(game.task, thing, appliance)
                walk.put(thing, target)
                yield walk


def _plans_for_two(game: Game, target: int, things: list[tuple[int, int]]) -> Iterator[_Walk]:
    there = sum(home == target for _, home in things)
    others = [pair for pair in things if pair[1] != target]
    orders = [[pair] for pair in others] if there else []
    if not there:
        orders = [[one, two] for one in others for two in others if one[0] != two[0]]
    for order in orders:
        walk = _Walk(game)
        for thing, home in order:
            walk.take(thing, home)
            walk.put(thing, target)
        yield walk


def _appliances(game: Game) -> list[int]:
    """The receptacles the task's treatment is done with."""
    kinds = {
        "clean": game.rules.cleaners,
        "heat": game.rules.heaters,
        "cool": game.rules.coolers,
    }[game.task]
    return [
        index
        for index, item in enumerate(game.receptacles)
        if item.kind in kinds and item.place is not None
    ]


_SEEN = re.compile(r"(?:On|In) (?:the ([a-z]+ \d+)|it), you see ([^.]*)\.")
_THING = re.compile(r"\ba ([a-z]+ \d+)")


class Searcher:
    """A player that looks for the object, takes it, treats it and brings it where it belongs.

    It visits the receptacles in an order drawn from its seed, those of the target's kind last (what
    is to go to a desk rarely lies on one). It opens what is closed, visits none twice to search,
    and goes straight to what it has already seen. It uses the first treating appliance and the
    first target, by number.

    Args:
      game: read for its task and the names and spellings a player sees; never for where things are.
      seed: of the order in which it searches.
      knows_homes: visit first what can hold the object at all. Without it the search is blind, and
        leaves a policy cloned from it more to learn.
      idleness: probability that a command is an idle one: with empty hands it looks around, else
        it lists what it carries. What is cloned from it knows how to play, and wastes its turns.
    """

    def __init__(
        self, game: Game, seed: int, *, knows_homes: bool = False, idleness: float = 0.0
    ) -> None:
        self._game = game
        self._knows_homes = knows_homes
        self._idleness = idleness
        self._whim = random.Random(f"whim/{seed}")
        self._spell = game.rules.commands
        self._search_object = self._order(random.Random(seed), game.object_kind)
        self._search_lamp = self._order(random.Random(seed), game.target_kind)
        self._seen: dict[str, list[str]] = {}  # receptacle -> objects last seen in it
        self._closed: set[str] = set()
        self._at = ""
        self._held = ""
        self._treated = False
        self._delivered: set[str] = set()
        self._last: tuple[str, str, str] = ("", "", "")  # key, object, receptacle
        self._treatment = self._first_of(
            {
                "clean": game.rules.cleaners,
                "heat": game.rules.heaters,
                "cool": game.rules.coolers,
            }.get(game.task, frozenset())
        )
        self._targets = self._numbered({game.target_kind})

    def act(self, observation: str) -> str:
        """The next command, given the newest text; the first one opens the game."""
        self._read(observation)
        idle = ("inventory" if self._held else "look", "", "")
        self._last = idle if self._whim.random() < self._idleness else self._decide()
        key, thing, receptacle = self._last
        return self._spell[key].format(o=thing, r=receptacle)

    def _order(self, rng: random.Random, kind: str) -> list[str]:
        """The names of the receptacles in the order in which to search them for a kind."""
        game = self._game
        places = [item for item in game.receptacles if item.place is not None]
        rng.shuffle(places)
        homes = {place for place, thing in game.accepts if thing == kind and self._knows_homes}

        def rank(place_kind: str) -> int:
            if homes and place_kind not in homes:
                return 2
            return int(game.task != "look" and place_kind == game.target_kind)

        return [item.name for item in sorted(places, key=lambda item: rank(item.kind))]

    def _numbered(self, kinds: Iterable[str]) -> list[str]:
        """The names of the receptacles of some kinds, by number."""
        kinds = set(kinds)
        names = [
            item.name
            for item in self._game.receptacles
            if item.kind in kinds and item.place is not None
        ]
        return sorted(names, key=lambda name: int(name.split()[-1]))

    def _first_of(self, kinds: Iterable[str]) -> str:
        return next(iter(self._numbered(kinds)), "")

    def _read(self, observation: str) -> None:
        """Takes in what the last command did."""
        key, thing, receptacle = self._last
        refused = observation.startswith(REFUSED)
        if key == "go":
            self._at = receptacle  # refused: it stands where one already is
        elif key == "take" and not refused:
            self._held = thing
            self._seen[receptacle].remove(thing)
        elif key == "take":
            self._seen[receptacle].remove(thing)
        elif key == "put" and not refused:
            self._held = ""
            self._delivered.add(thing)
        elif key == "put":
            self._targets.remove(receptacle)
        elif key == self._game.task and not refused:
            self._treated = True
        if key in ("go", "open", "examine_receptacle") and not refused:
            seen = _SEEN.search(observation)
            if seen:
                self._seen[receptacle] = _THING.findall(seen[2])
                self._closed.discard(receptacle)
            else:
                self._closed.add(receptacle)
                self._seen.setdefault(receptacle, [])

    def mistake(self) -> str:
        """A command one might try here in vain: most reach for what is wanted but not here."""
        pick = self._whim.choice
        place = pick(self._search_object)
        key, thing = "take", f"{self._game.object_kind} {pick((1, 1, 2))}"
        if self._held:
            key, thing = "put", self._held
        if self._whim.random() < 0.3:
            key = pick(("go", "open", "take", "put", "use", "clean", "heat", "cool"))
            thing = pick((thing, f"{pick(self._game.objects).kind} 1"))
        else:
            place = self._at or place
        return self._spell[key].format(o=thing, r=place)

    def _decide(self) -> tuple[str, str, str]:
        game = self._game
        if not self._held:
            return self._toward(game.object_kind, "take", self._search_object)
        if game.task == "look":
            return self._toward(game.target_kind, "use", self._search_lamp)
        if self._treatment and not self._treated:
            if self._at != self._treatment:
                return "go", "", self._treatment
            return game.task, self._held, self._treatment
        target = self._targets[0] if self._targets else self._at
        if self._at != target:
            return "go", "", target
        return self._unless_hidden(target) or ("put", self._held, target)

    def _unless_hidden(self, receptacle: str) -> tuple[str, str, str] | None:
        """What makes the contents of the receptacle one stands at known and reachable."""
        if receptacle not in self._seen:
            return "examine_receptacle", "", receptacle
        if receptacle in self._closed:
            return "open", "", receptacle
        return None

    def _toward(self, kind: str, key: str, order: list[str]) -> tuple[str, str, str]:
        """The next step towards doing `key` to an object of a kind that may not be found yet."""
        places = [self._at, *self._seen] if self._at in self._seen else list(self._seen)
        for receptacle in places:
            for thing in self._seen[receptacle]:
                if thing.split()[0] == kind and thing not in self._delivered:
                    if self._at == receptacle:
                        return key, thing, receptacle
                    return "go", "", receptacle
        if self._at:
            hidden = self._unless_hidden(self._at)
            if hidden:
                return hidden
        for receptacle in order:
            if receptacle not in self._seen or receptacle in self._closed:
                return "go", "", receptacle
        return "look", "", ""
