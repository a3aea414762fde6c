"""Writes a generated game as an official game file, which the original engine can play too.

The file needs a PDDL domain and a text grammar. Ours are put together here from the rules the
engine plays, as small as they can be: only the texts a player sees and the commands a player types
are those of the original, since they are the interface.
"""

from __future__ import annotations

import json
from typing import Any

from bpo_jax.environments.alfworld.game import TASK_TYPES, Game, Rules
from bpo_jax.environments.alfworld.goal import Exists

_ABILITIES = ("pickupable", "toggleable", "heatable", "coolable", "cleanable", "sliceable")
_PROPERTIES = {
    "clean": "isclean",
    "hot": "ishot",
    "cool": "iscool",
    "toggled": "istoggled",
    "lit": "ison",
    "sliced": "issliced",
}


def to_tw_pddl(game: Game) -> dict[str, Any]:
    """The game as the JSON object of a ``game.tw-pddl`` file.

    Args:
      game: one whose entities are named and ordered as `generator.generate` does.

    Returns:
      The object; `loader.load_game` reads it back to the same game, but for the id, which is where
      the file lies (see `folder_of`).

    Raises:
      ValueError: if the names are not the ones a reader would give.
    """
    _check_names(game.id, [(item.name, item.kind) for item in game.receptacles])
    _check_names(game.id, [(item.name, item.kind) for item in game.objects])
    return {
        "pddl_domain": _domain(game.rules),
        "grammar": _grammar(game),
        "pddl_problem": _problem(game),
        "solvable": True,
        "walkthrough": list(game.walkthrough or ()),
    }


def _check_names(game: str, items: list[tuple[str, str]]) -> None:
    """Refuses (name, kind) pairs whose numbers do not count down within a kind."""
    left: dict[str, int] = {}
    for name, kind in reversed(items):
        left[kind] = left.get(kind, 0) + 1
        if name != f"{kind} {left[kind]}":
            raise ValueError(
                f"game {game}: expected the name {kind} {left[kind]}, got {name!r}; "
                "names count down within a kind"
            )


def folder_of(game: Game) -> str:
    """The folder of its file within a split: ``<task>/<trial>``, as the official ones are named."""
    task = f"{TASK_TYPES[game.task]}-{game.object_kind}-None-{game.target_kind}-0"
    return f"{task}/trial_{game.id.replace('/', '_')}"


def _domain(rules: Rules) -> str:
    """The PDDL domain: what each action needs and does."""
    at = "(atLocation ?a ?l) (receptacleAtLocation ?r ?l)"
    reachable = "(or (not (openable ?r)) (opened ?r))"
    here = "?a - agent ?l - location"
    cost = "(increase (total-cost) {})".format

    def one_of(predicate: str, variable: str, kinds: frozenset[str]) -> str:
        choices = (f"({predicate} {variable} {kind}Type)" for kind in sorted(kinds))
        return f"(or {' '.join(choices)})"

    def treat(name: str, ability: str, kinds: frozenset[str], *effects: str) -> tuple[str, ...]:
        need = f"(and ({ability} ?o) {one_of('receptacleType', '?r', kinds)} {at} (holds ?a ?o))"
        effect = f"(and {cost(5)} {' '.join(effects)})"
        return name, f"{here} ?r - receptacle ?o - object", need, effect

    actions = (
        ("look", here, "(and (atLocation ?a ?l))", "(and (checked ?l))"),
        ("inventory", "?a - agent", "()", "(and (checked ?a))"),
        ("help", "?a - agent", "()", "(and (checked ?a))"),
        (
            "examineReceptacle",
            "?a - agent ?r - receptacle",
            f"(and (exists (?l - location) (and {at})))",
            "(and (checked ?r))",
        ),
        (
            # The comma makes a type that nothing has, so only what is held can be examined. The
            # original has it, and the engine plays by it.
            "examineObject",
            "?a - agent ?o - object",
            f"(or (exists (?l - location, ?r - receptacle) (and {at} (inReceptacle ?o ?r) "
            f"{reachable})) (holds ?a ?o))",
            "(and (checked ?o))",
        ),
        (
            "GotoLocation",
            "?a - agent ?lStart - location ?lEnd - location ?r - receptacle",
            "(and (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))",
            f"(and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd) {cost(1)})",
        ),
        (
            "OpenObject",
            f"{here} ?r - receptacle",
            f"(and (openable ?r) {at} (not (opened ?r)))",
            f"(and (opened ?r) (checked ?r) {cost(1)})",
        ),
        (
            "CloseObject",
            f"{here} ?r - receptacle",
            f"(and (openable ?r) {at} (opened ?r))",
            f"(and (not (opened ?r)) {cost(1)})",
        ),
        (
            "PickupObject",
            f"{here} ?o - object ?r - receptacle",
            f"(and (pickupable ?o) {at} (inReceptacle ?o ?r) (not (holdsAny ?a)) {reachable})",
            "(and (not (inReceptacle ?o ?r)) (holds ?a ?o) (holdsAny ?a) "
            f"(not (objectAtLocation ?o ?l)) {cost(1)})",
        ),
        (
            "PutObject",
            f"{here} ?o - object ?r - receptacle ?ot - otype ?rt - rtype",
            f"(and (holds ?a ?o) {at} {reachable} (objectType ?o ?ot) (receptacleType ?r ?rt) "
            "(canContain ?rt ?ot))",
            "(and (inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) "
            f"(not (holdsAny ?a)) {cost(1)})",
        ),
        treat("CleanObject", "cleanable", rules.cleaners, "(isClean ?o)"),
        treat("HeatObject", "heatable", rules.heaters, "(isHot ?o)", "(not (isCool ?o))"),
        treat("CoolObject", "coolable", rules.coolers, "(isCool ?o)", "(not (isHot ?o))"),
        (
            "ToggleObject",
            f"{here} ?o - object ?r - receptacle",
            f"(and (toggleable ?o) {at} (inReceptacle ?o ?r))",
            f"(and {cost(5)} (when (isOn ?o) (not (isOn ?o))) (when (not (isOn ?o)) (isOn ?o)) "
            "(isToggled ?o))",
        ),
        (
            "SliceObject",
            f"{here} ?co - object ?ko - object",
            f"(and (sliceable ?co) {one_of('objectType', '?ko', rules.cutters)} "
            "(atLocation ?a ?l) (objectAtLocation ?co ?l) (holds ?a ?ko))",
            f"(and {cost(5)} (isSliced ?co))",
        ),
    )
    one = {
        "object": (*_ABILITIES, *_PROPERTIES.values(), "isReceptacleObject"),
        "receptacle": ("openable", "opened", "checked"),
        "agent": ("holdsAny",),
    }
    two = {
        "atLocation": ("agent", "location"),
        "receptacleAtLocation": ("receptacle", "location"),
        "objectAtLocation": ("object", "location"),
        "inReceptacle": ("object", "receptacle"),
        "inReceptacleObject": ("object", "object"),
        "holds": ("agent", "object"),
        "objectType": ("object", "otype"),
        "receptacleType": ("receptacle", "rtype"),
        "canContain": ("rtype", "otype"),
    }
    predicates = [f"({name} ?x - {sort})" for sort, names in one.items() for name in names]
    predicates += [f"({name} ?x - {a} ?y - {b})" for name, (a, b) in two.items()]
    return "\n".join(
        (
            "(define (domain alfred)",
            "(:requirements :adl :action-costs :typing)",
            "(:types agent location receptacle object rtype otype)",
            f"(:predicates {' '.join(predicates)})",
            "(:functions (total-cost) - number)",
            *(
                f"(:action {name} :parameters ({given}) :precondition {need} :effect {effect})"
                for name, given, need, effect in actions
            ),
            ")",
        )
    )


def _problem(game: Game) -> str:
    """The PDDL problem: what there is, how it starts, and the goal."""
    start = game.start
    places = [f"loc_bar_{index:03d}" for index in range(game.places)]
    receptacles = [_identifier(item.kind, index) for index, item in enumerate(game.receptacles)]
    things = [_identifier(item.kind, index) for index, item in enumerate(game.objects)]
    rules = game.rules
    rtypes = {item.kind for item in game.receptacles} | {pair[0] for pair in game.accepts}
    rtypes |= rules.cleaners | rules.heaters | rules.coolers
    otypes = {item.kind for item in game.objects} | {pair[1] for pair in game.accepts}
    otypes |= rules.cutters
    for part in game.goal:
        for literal in part.literals:
            if literal[0] in ("receptacletype", "objecttype"):
                (rtypes if literal[0] == "receptacletype" else otypes).add(literal[2])
    declared = [
        ("agent1", "agent"),
        *((name, "location") for name in places),
        *((name, "receptacle") for name in receptacles),
        *((name, "object") for name in things),
        *((f"{kind}Type", "rtype") for kind in sorted(rtypes)),
        *((f"{kind}Type", "otype") for kind in sorted(otypes)),
    ]
    facts: list[tuple[str, ...]] = [("atLocation", "agent1", places[start.place])]
    for index, item in enumerate(game.receptacles):
        name = receptacles[index]
        facts.append(("receptacleType", name, f"{item.kind}Type"))
        if item.place is not None:
            facts.append(("receptacleAtLocation", name, places[item.place]))
        if item.openable:
            facts.append(("openable", name))
        if index in start.opened:
            facts.append(("opened", name))
        facts += [("inReceptacle", things[inside], name) for inside in start.contents[index]]
    for index, thing in enumerate(game.objects):
        name = things[index]
        facts.append(("objectType", name, f"{thing.kind}Type"))
        facts += [(ability, name) for ability in _ABILITIES if getattr(thing, ability)]
        if thing.vessel:
            facts.append(("isReceptacleObject", name))
        facts += [("inReceptacleObject", things[inner], name) for inner in thing.holds]
        facts += [(fact, name) for key, fact in _PROPERTIES.items() if index in getattr(start, key)]
    facts += [("objectAtLocation", things[one], places[at]) for one, at in sorted(start.lying)]
    facts += [("canContain", f"{r}Type", f"{o}Type") for r, o in sorted(game.accepts)]
    if start.holding is not None:
        facts += [("holds", "agent1", things[start.holding]), ("holdsAny", "agent1")]
    return "\n".join(
        (
            "(define (problem generated)",
            "(:domain alfred)",
            "(:objects",
            *(f"{name} - {sort}" for name, sort in declared),
            ")",
            "(:init",
            *(f"({' '.join(fact)})" for fact in facts),
            ")",
            f"(:goal (and {' '.join(map(_condition, game.goal))}))",
            ")",
        )
    )


def _identifier(kind: str, index: int) -> str:
    """An identifier that sorts by kind and then by index, and is read as an entity of the kind."""
    if kind.endswith("basin"):  # a reader adds the word again
        return f"{kind.removesuffix('basin')}_bar_{index:03d}_bar_{kind}"
    return f"{kind}_bar_{index:03d}"


def _condition(part: Exists) -> str:
    """One part of a goal as PDDL."""
    literals = []
    for predicate, *arguments in part.literals:
        if predicate == "!=":
            literals.append(f"(not (= {' '.join(arguments)}))")
        elif predicate.endswith("type"):
            literals.append(f"({predicate} {arguments[0]} {arguments[1]}Type)")
        else:
            literals.append(f"({predicate} {' '.join(arguments)})")
    variables = " ".join(f"{name} - {sort}" for name, sort in part.variables)
    return f"(exists ({variables}) (and {' '.join(literals)}))"


def _grammar(game: Game) -> str:
    """The text grammar: how commands are spelt, and what they answer."""
    spelled = {
        name: game.rules.commands[key].replace("{o}", "{co}").replace("{tool}", "{ko}")
        if key == "slice"
        else game.rules.commands[key]
        for name, key in _SPELLED.items()
    }
    going = "[{r.name | receptacleatlocation(r:receptacle, lend:location)}]"
    spelled["GotoLocation"] = spelled["GotoLocation"].replace("{r}", going)
    rules = {"task": [{"rhs": f"Your task is to: {game.text}"}]}
    for symbol, wordings in _ANSWERS.items():
        rules[symbol] = [
            {"condition": condition, "rhs": said} if condition else {"rhs": said}
            for condition, said in wordings
        ]
    blocks = [f'grammar :: """\n{json.dumps(rules, indent=1)}\n""";']
    for name, template in spelled.items():
        answer = f"#{name[0].lower() + name[1:] if name in _LOWERED else name}.feedback#"
        if name == "help":
            answer = "\n" + game.rules.help.lstrip("\n")
        blocks.append(f'action {name} {{\n template :: "{template}";\n feedback :: "{answer}";\n}}')
    return "\n\n".join(blocks) + "\n"


_SPELLED = {
    "GotoLocation": "go",
    "OpenObject": "open",
    "CloseObject": "close",
    "PickupObject": "take",
    "PutObject": "put",
    "examineReceptacle": "examine_receptacle",
    "examineObject": "examine_object",
    "ToggleObject": "use",
    "HeatObject": "heat",
    "CleanObject": "clean",
    "CoolObject": "cool",
    "SliceObject": "slice",
    "look": "look",
    "inventory": "inventory",
    "help": "help",
}
"""The actions by their names in the official files."""

_LOWERED = ("ToggleObject", "HeatObject", "CleanObject", "CoolObject", "SliceObject")

_OBJECTS = "[{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}]"
_CLEAN, _HOT, _COOL, _SLICED = (
    f"{word}(o:object)" for word in ("isclean", "ishot", "iscool", "issliced")
)
_HERE = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
_LEFT = (
    "atlocation(a:agent, l:location) & objectatlocation(o:object, l:location) & "
    "receptacleatlocation(r:receptacle, l:location) & not_inreceptacle(o:object, r:receptacle)"
)
_SWITCH = "toggleable(o:object)"

_ANSWERS: dict[str, tuple[tuple[str, str], ...]] = {
    "intro": (("", "-= Welcome to TextWorld, ALFRED! =-\n\n#look.feedback#\n\n#task#"),),
    "GotoLocation.feedback": (("", "You arrive at {r.name}. #examineReceptacle.feedback#"),),
    "OpenObject.feedback": (("", "You open the {r.name}. #examineReceptacle.feedback#"),),
    "CloseObject.feedback": (("", "You close the {r.name}."),),
    "PickupObject.feedback": (("", "You pick up the {o.name} from the {r.name}."),),
    "PutObject.feedback": (("", "You move the {o.name} to the {r.name}."),),
    "heatObject.feedback": (("", "You heat the {o.name} using the {r.name}."),),
    "cleanObject.feedback": (("", "You clean the {o.name} using the {r.name}."),),
    "coolObject.feedback": (("", "You cool the {o.name} using the {r.name}."),),
    "sliceObject.feedback": (("", "You sliced the {co.name} with the {ko.name}."),),
    "toggleObject.feedback": (
        (f"{_SWITCH} & istoggled(o:object)", "You turn on the {o.name}."),
        (_SWITCH, "You turn off the {o.name}."),
        ("", "You don't see any switch on the {o.name}."),
    ),
    "inventory.feedback": (
        (
            "holdsany(a:agent)",
            "You are carrying: [{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}].",
        ),
        ("", "You are not carrying anything."),
    ),
    "examineReceptacle.feedback": (
        (
            "openable(r:receptacle) & opened(r:receptacle)",
            f"The {{r.name}} is open. In it, you see {_OBJECTS}.",
        ),
        ("openable(r:receptacle)", "The {r.name} is closed."),
        ("", f"On the {{r.name}}, you see {_OBJECTS}."),
    ),
    "examineObject.feedback": (
        (
            "isreceptacleobject(o:object)",
            "This is a normal {o.name}. In it, you see [{o2.indefinite + ' ' + o2.name | "
            "inreceptacleobject(o2:object, o:object)}].",
        ),
        (f"{_CLEAN} & {_HOT} & {_SLICED}", "This is a hot and clean sliced {o.name}."),
        (f"{_CLEAN} & {_COOL} & {_SLICED}", "This is a cool and clean sliced {o.name}."),
        (f"{_CLEAN} & {_SLICED}", "This is a clean sliced {o.name}."),
        (f"{_HOT} & {_SLICED}", "This is a hot sliced {o.name}."),
        (f"{_COOL} & {_SLICED}", "This is a cool sliced {o.name}."),
        (f"{_CLEAN} & {_HOT}", "This is a hot and clean {o.name}."),
        (f"{_CLEAN} & {_COOL}", "This is a cool and clean {o.name}."),
        (_HOT, "This is a hot {o.name}."),
        (_CLEAN, "This is a clean {o.name}."),
        (_COOL, "This is a cold {o.name}."),
        (f"{_SWITCH} & istoggled(o:object)", "This {o.name} is on."),
        (f"{_SWITCH} & not_istoggled(o:object)", "This {o.name} is off."),
        (f"sliceable(o:object) & {_SLICED}", "This is a sliced {o.name}."),
        ("", "There's nothing special about {o.name}."),
    ),
    "look.feedback": (
        (_HERE, "#look-variations#. Next to it, you see #list_objects_on_the_floor#."),
        (
            "",
            "You are in the middle of a room. Looking quickly around you, you see "
            "#list_appliances#.",
        ),
    ),
    "look-variations": (("", f"You are facing the [{{r.name | {_HERE}}}]"),),
    "list_objects_on_the_floor": ((_LEFT, f"[{{#overview(o)# | {_LEFT}}}]"), ("", "nothing")),
    "list_appliances": (
        (
            "receptacleatlocation(r:receptacle, l:location)",
            "[{#overview(r)# | receptacleatlocation(r:receptacle, l:location)}]",
        ),
        ("", "nothing"),
    ),
    "overview(o)": (("", "{o.indefinite} {o.name}"),),
    "overview(r)": (("", "{r.indefinite} {r.name or r.id}"),),
    "list_empty": (("", "nothing"),),
    "list_separator": (("", ", "),),
    "list_last_separator": (("", ", and "),),
}
"""What the actions answer: for each symbol, in this order, (condition, text) pairs."""
