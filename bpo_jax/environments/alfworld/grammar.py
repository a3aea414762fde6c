"""Reading the text grammar of official ALFWorld games, and checking that its texts are ours.

A game file carries a grammar: for every action how its command is spelt and what it answers, the
latter as rewriting rules. The engine writes these texts itself; here each action's answer, with all
rules it can reach, is compared by fingerprint with what the engine says. The spelling of commands
and the answer to `help` are read from the file.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bpo_jax.environments.alfworld.pddl import Unsupported, digest

_KEYS = {
    "gotolocation": "go",
    "openobject": "open",
    "closeobject": "close",
    "pickupobject": "take",
    "putobject": "put",
    "examinereceptacle": "examine_receptacle",
    "examineobject": "examine_object",
    "toggleobject": "use",
    "heatobject": "heat",
    "cleanobject": "clean",
    "coolobject": "cool",
    "sliceobject": "slice",
    "look": "look",
    "inventory": "inventory",
    "help": "help",
}
"""The actions of a grammar, and what the engine calls them."""

_TEXTS = {
    "go": "67a2d5573c6238e1",
    "open": "b11b02f95f234a74",
    "close": "97747510f35dba8c",
    "take": "539b312cf3e2a5b9",
    "put": "86a5f55b7f4ea200",
    "examine_receptacle": "c9b6b45ed11045e6",
    "examine_object": "2ab4daabd67b8e84",
    "use": "8d4364d61bb30d28",
    "heat": "d9cee0c68b4ebaaa",
    "clean": "adad6ea9696faf3b",
    "cool": "d07687e45f7b03fa",
    "slice": "ccb7c14761e56555",
    "look": "d65493d29da06ff1",
    "inventory": "4b7cb995a148a88f",
    "intro": "2637eefe20b64cb7",
}
"""What the engine's answers amount to: fingerprints of the rules that word each of them."""

_SLOTS_OF = {
    **{key: {"r"} for key in ("go", "open", "close", "examine_receptacle")},
    **{key: {"o", "r"} for key in ("take", "put", "heat", "clean", "cool")},
    **{key: {"o"} for key in ("examine_object", "use")},
    "slice": {"o", "tool"},
}
_SLOT_NAMES = {"r": "r", "o": "o", "co": "o", "ko": "tool"}
_TASK_PREFIX = "Your task is to: "
_TASK = re.compile(r'"task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*("(?:[^"\\]|\\.)*")\s*\}\s*\]')
_BLOCK = re.compile(r'grammar\s*::\s*"""(.*?)"""\s*;', re.DOTALL)
_ACTION = re.compile(r'action\s+(\w+)\s*\{(.*?feedback\s*::\s*"[^"]*"\s*;)', re.DOTALL)
_FIELD = re.compile(r'(template|feedback)\s*::\s*"([^"]*)"', re.DOTALL)
_QUERY = re.compile(r"\[\{(\w+)\.name \|[^\]]*\}\]")
_SLOT = re.compile(r"\{([^}]*)\}")
_LINK = re.compile(r"#([^#]+)#")


def read_task(text: str) -> tuple[str, str]:
    """The task in words, and the grammar without it (which all games share).

    Raises:
      Unsupported: there is no task, or it is introduced otherwise.
    """
    found = _TASK.findall(text)
    task = json.loads(found[0]) if len(found) == 1 else ""
    if not task.startswith(_TASK_PREFIX):
        raise Unsupported(f'its grammar has no rule "task" that begins {_TASK_PREFIX!r}')
    return task.removeprefix(_TASK_PREFIX), _TASK.sub('"task": []', text)


@functools.lru_cache(maxsize=8)
def check_grammar(text: str) -> tuple[Mapping[str, str], str]:
    """Compare a grammar with what the engine says.

    Args:
      text: the grammar without its task, as `read_task` gives it.

    Returns:
      The spelling of every command (keys as in `game.COMMANDS`) and the answer to `help`.

    Raises:
      Unsupported: something differs or is missing.
    """
    actions = {name.lower(): dict(_FIELD.findall(body)) for name, body in _ACTION.findall(text)}
    if missing := sorted(_KEYS.keys() - actions.keys()):
        raise Unsupported(f"its grammar lacks the action {missing[0]!r}")
    rules = _rules(text)
    commands, answers = {}, {"intro": "#intro#"}
    for name, key in _KEYS.items():
        commands[key] = _spelling(key, actions[name].get("template", ""))
        answers[key] = actions[name].get("feedback", "")
    spoken = answers.pop("help")
    for key, answer in answers.items():
        if digest(_wording(answer, rules)) != _TEXTS[key]:
            raise Unsupported(f"its grammar words the answer to {key!r} in another way")
    link = _LINK.fullmatch(spoken)
    if link:
        spoken = "".join(rule.get("rhs", "") for rule in rules.get(link[1], []))
    return MappingProxyType(commands), spoken.replace("\\n", "\n").lstrip("\n")


def _rules(text: str) -> dict[str, list[dict[str, str]]]:
    """The rewriting rules of all blocks, by the symbol they rewrite."""
    rules: dict[str, list[dict[str, str]]] = {}
    for block in _BLOCK.findall(text):
        lines = [line for line in block.split("\n") if not line.lstrip().startswith("#")]
        try:
            rules.update(json.loads("\n".join(lines)))
        except ValueError as error:
            raise Unsupported(f"its grammar is not valid JSON ({error})") from error
    return rules


def _spelling(key: str, template: str) -> str:
    """A command's template with the engine's names for its slots."""
    plain = _QUERY.sub(r"{\1}", template)
    if "in/on" in plain:
        raise Unsupported(f"it is of an older release, whose commands read {template!r}")
    slots = [_SLOT_NAMES.get(slot, "") for slot in _SLOT.findall(plain)]
    if set(slots) != _SLOTS_OF.get(key, set()) or "[" in plain:
        raise Unsupported(f"its grammar spells the command {key!r} as {template!r}")
    return _SLOT.sub(lambda slot: "{" + _SLOT_NAMES[slot[1]] + "}", plain)


def _wording(answer: str, rules: dict[str, list[dict[str, str]]]) -> list[Any]:
    """An answer with every rule it can reach, in a fixed order; the task itself is left out."""
    reached: dict[str, Any] = {}
    waiting = _links(answer)
    while waiting:
        symbol = waiting.pop()
        if symbol in reached or symbol == "task":
            continue
        # A JSON file may give a rule any keys; only these decide what it says.
        pairs = [(rule.get("condition", ""), rule.get("rhs", "")) for rule in rules.get(symbol, [])]
        reached[symbol] = pairs
        waiting += [link for _, said in pairs for link in _links(said)]
    return [answer, sorted(reached.items())]


def _links(said: str) -> list[str]:
    """The symbols a text is rewritten through; lists also use those for their separators."""
    lists = ["list_empty", "list_separator", "list_last_separator"] if "[" in said else []
    return [*_LINK.findall(said), *lists]
