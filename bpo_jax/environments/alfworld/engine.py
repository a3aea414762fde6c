"""The rules of ALFWorld, played natively: what a command does, says, earns, and what may come next.

The rules and the texts are those of the text game of ALFWorld (Shridhar et al., 2021) as TextWorld
(Côté et al., 2018) plays its 2.1.3 release, exactly, down to its oddities:

* A command counts only if it is admissible, letter for letter; blanks around it are dropped. Any
  other one says "Nothing happens." and changes nothing.
* An object can be examined only while it is held.
* `go to` is offered for no receptacle at the place where one stands.
* An object in a closed receptacle can still be used or sliced.
* `use` always says "turn on", and its object counts as used from then on.
* Beside a receptacle `look` lists what was taken from it and put into another one at its place.
* The reward is 1 after every step that leaves the goal reached, also again and again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bpo_jax.environments.alfworld.game import Game, State
from bpo_jax.environments.alfworld.goal import achieved

REFUSED = "Nothing happens."

_Deed = tuple[str, int, int]
"""An action on entities: its key in `Rules.commands`, then two indices whose meaning it knows."""


def initial_state(game: Game) -> State:
    """The state every play of the game begins in."""
    return game.start


def first_observation(game: Game) -> str:
    """The text that opens a play: the room and the task."""
    here = game.receptacles_at[game.start.place]
    if here:
        room = _look(game, game.start)
    else:
        seen = _listing(f"a {item.name}" for item in game.receptacles if item.place is not None)
        room = _middle_of_room(seen)
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {game.text}"


def won(game: Game, state: State) -> bool:
    """Whether the goal is reached in this state."""
    return achieved(game, state)


def admissible(game: Game, state: State) -> list[str]:
    """Every command that does something in this state, in alphabetical order."""
    return sorted(_deeds(game, state))


def step(game: Game, state: State, command: str) -> tuple[State, str, int, bool]:
    """Play one command.

    Args:
      game: the game.
      state: where it stands; it is not changed.
      command: the text typed.

    Returns:
      The next state, the text shown, the reward (1 if the goal is reached, else 0), and whether it
      is reached. Playing on after that is allowed.
    """
    deed = _deeds(game, state).get(command.strip())
    if deed is None:
        text = REFUSED
    else:
        state = _apply(game, state, deed)
        text = _tell(game, state, deed)
    goal_reached = achieved(game, state)
    return state, text, int(goal_reached), goal_reached


def _deeds(game: Game, state: State) -> dict[str, _Deed]:
    """The admissible commands, each with what it does."""
    spell = game.rules.commands
    here = game.receptacles_at[state.place]
    deeds: dict[str, _Deed] = {spell[key]: (key, 0, 0) for key in ("look", "inventory", "help")}

    def offer(key: str, thing: int, receptacle: int) -> None:
        text = spell[key].format(o=game.objects[thing].name, r=game.receptacles[receptacle].name)
        deeds[text] = (key, thing, receptacle)

    go = spell["go"]
    for index, receptacle in enumerate(game.receptacles):
        if receptacle.place is not None and receptacle.place != state.place:
            deeds[go.format(r=receptacle.name)] = ("go", 0, index)
    held = state.holding
    for index in here:
        receptacle = game.receptacles[index]
        is_open = index in state.opened
        reachable = is_open or not receptacle.openable
        deeds[spell["examine_receptacle"].format(r=receptacle.name)] = (
            "examine_receptacle",
            0,
            index,
        )
        if receptacle.openable:
            key = "close" if is_open else "open"
            deeds[spell[key].format(r=receptacle.name)] = (key, 0, index)
        for thing in state.contents[index]:
            if held is None and reachable and game.objects[thing].pickupable:
                offer("take", thing, index)
            if game.objects[thing].toggleable:
                offer("use", thing, index)
        if held is not None:
            for key in _uses_of_held(game, held, index, reachable):
                offer(key, held, index)
    if held is not None:
        name = game.objects[held].name
        deeds[spell["examine_object"].format(o=name)] = ("examine_object", held, 0)
        if game.objects[held].kind in game.rules.cutters:
            for thing, place in state.lying:
                if place == state.place and game.objects[thing].sliceable:
                    text = spell["slice"].format(o=game.objects[thing].name, tool=name)
                    deeds[text] = ("slice", thing, held)
    return deeds


def _uses_of_held(game: Game, held: int, receptacle: int, reachable: bool) -> list[str]:
    """What can be done to the held object with a receptacle one stands at."""
    thing, kind = game.objects[held], game.receptacles[receptacle].kind
    rules = game.rules
    offers = {
        "put": reachable and (kind, thing.kind) in game.accepts,
        "clean": thing.cleanable and kind in rules.cleaners,
        "heat": thing.heatable and kind in rules.heaters,
        "cool": thing.coolable and kind in rules.coolers,
    }
    return [key for key, offered in offers.items() if offered]


def _apply(game: Game, state: State, deed: _Deed) -> State:
    """The state after an admissible action."""
    key, thing, other = deed
    change = dataclasses.replace
    match key:
        case "go":
            place = game.receptacles[other].place
            assert place is not None
            return change(state, place=place)
        case "open":
            return change(state, opened=state.opened | {other})
        case "close":
            return change(state, opened=state.opened - {other})
        case "take":
            left = tuple(item for item in state.contents[other] if item != thing)
            return change(
                state,
                holding=thing,
                contents=_with_contents(state, other, left),
                lying=state.lying - {(thing, state.place)},
                taken=state.taken | {(thing, other)},
            )
        case "put":
            filled = tuple(sorted({*state.contents[other], thing}))
            return change(
                state,
                holding=None,
                contents=_with_contents(state, other, filled),
                lying=state.lying | {(thing, state.place)},
                taken=state.taken - {(thing, other)},
            )
        case "use":
            return change(state, toggled=state.toggled | {thing}, lit=state.lit ^ {thing})
        case "heat":
            return change(state, hot=state.hot | {thing}, cool=state.cool - {thing})
        case "cool":
            return change(state, cool=state.cool | {thing}, hot=state.hot - {thing})
        case "clean":
            return change(state, clean=state.clean | {thing})
        case "slice":
            return change(state, sliced=state.sliced | {thing})
    return state


def _with_contents(
    state: State, receptacle: int, inside: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """The contents of all receptacles with one of them replaced."""
    return (*state.contents[:receptacle], inside, *state.contents[receptacle + 1 :])


def _tell(game: Game, state: State, deed: _Deed) -> str:
    """What an action says; `state` is the one after it."""
    key, thing, other = deed
    match key:
        case "look":
            return _look(game, state)
        case "inventory":
            if state.holding is None:
                return "You are not carrying anything."
            return f"You are carrying: a {game.objects[state.holding].name}."
        case "help":
            return game.rules.help
        case "examine_object":
            return _describe(game, state, thing)
        case "slice":
            return f"You sliced the {game.objects[thing].name} with the {game.objects[other].name}."
    receptacle = game.receptacles[other].name
    name = game.objects[thing].name if game.objects else ""
    match key:
        case "go":
            return f"You arrive at {receptacle}. {_inside(game, state, other)}"
        case "open":
            return f"You open the {receptacle}. {_inside(game, state, other)}"
        case "close":
            return f"You close the {receptacle}."
        case "take":
            return f"You pick up the {name} from the {receptacle}."
        case "put":
            return f"You move the {name} to the {receptacle}."
        case "use":
            return f"You turn on the {name}."
        case "heat" | "clean" | "cool":
            return f"You {key} the {name} using the {receptacle}."
    return _inside(game, state, other)


def _inside(game: Game, state: State, receptacle: int) -> str:
    """A receptacle as it looks from near by."""
    item = game.receptacles[receptacle]
    if item.openable and receptacle not in state.opened:
        return f"The {item.name} is closed."
    seen = _listing(f"a {game.objects[thing].name}" for thing in state.contents[receptacle])
    if item.openable:
        return f"The {item.name} is open. In it, you see {seen}."
    return f"On the {item.name}, you see {seen}."


def _look(game: Game, state: State) -> str:
    """What is around the agent; away from every receptacle that is nothing at all."""
    here = game.receptacles_at[state.place]
    if not here:
        return _middle_of_room("nothing")
    facing = _listing(game.receptacles[index].name for index in here)
    lying = sorted(thing for thing, place in state.lying if place == state.place)
    beside = _listing(
        f"a {game.objects[thing].name}"
        for thing in lying
        for index in here
        if (thing, index) in state.taken
    )
    return f"You are facing the {facing}. Next to it, you see {beside}."


def _middle_of_room(seen: str) -> str:
    return f"You are in the middle of a room. Looking quickly around you, you see {seen}."


def _describe(game: Game, state: State, thing: int) -> str:
    """An object as it looks in the hand: the first description that fits."""
    item = game.objects[thing]
    if item.vessel:
        seen = _listing(f"a {game.objects[inner].name}" for inner in item.holds)
        return f"This is a normal {item.name}. In it, you see {seen}."
    clean, sliced = thing in state.clean, thing in state.sliced
    warmth = "hot" if thing in state.hot else "cool" if thing in state.cool else ""
    words = " and ".join(word for word in (warmth, "clean" if clean else "") if word)
    if words and sliced:
        return f"This is a {words} sliced {item.name}."
    if words:
        # Cool alone is called cold; with anything else it stays cool.
        return f"This is a {'cold' if words == 'cool' else words} {item.name}."
    if item.toggleable and thing in state.toggled:
        return f"This {item.name} is on."
    if item.sliceable and sliced:
        return f"This is a sliced {item.name}."
    return f"There's nothing special about {item.name}."


def _listing(items: Iterable[str]) -> str:
    """Items in a row: commas between them, and an "and" before the last."""
    row = list(items)
    if not row:
        return "nothing"
    if len(row) == 1:
        return row[0]
    return f"{', '.join(row[:-1])}, and {row[-1]}"
