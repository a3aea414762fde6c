"""How a game and a policy talk: what a turn looks like, and what the policy is shown.

``plain``: the whole turn is the command, and what is shown is the game's own text; for small
policies that are taught the game from nothing.
``bpo``: a chat with instructions; a turn may think between <think> and </think>, then comes the
command on a line of its own. As in the BPO paper the whole history stays in view.
``gigpo``: a turn is <think>…</think><action>…</action>, and every observation lists the admissible
commands. As in the GiGPO line of work (Feng et al., 2025), a win pays 10 and an unreadable turn
costs 0.1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from bpo_jax.sandbox.api import InvalidAction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """A way of talking.

    Attributes:
      name: what it is chosen by.
      instructions: what stands above the first observation in the prompt; may be empty.
      parse: the command in a turn.
      turn: a turn that gives a command, with a thought where the protocol has room for one.
      lists_admissible: every observation lists the admissible commands.
      win_reward: paid for reaching the goal.
      invalid_penalty: what a turn costs in which no command can be read.
      max_turns: how long an episode lasts, unless another length is asked for.
    """

    name: str
    instructions: str
    parse: Callable[[str], str | InvalidAction]
    turn: Callable[[str, str], str]
    lists_admissible: bool = False
    win_reward: float = 1.0
    invalid_penalty: float = 0.0
    max_turns: int = 50


_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def _parse_plain(text: str) -> str | InvalidAction:
    return text.strip()


def _turn_plain(command: str, thought: str) -> str:
    return command


def _parse_chat(text: str) -> str | InvalidAction:
    said = _THOUGHT.sub("", text, count=1)
    if "<think>" in said:
        return InvalidAction(reason="The thought is not closed by </think>.")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if len(lines) != 1:
        return InvalidAction(reason=f"Expected one line with a command, got {len(lines)} lines.")
    return lines[0]


def _turn_chat(command: str, thought: str) -> str:
    return f"<think>{thought}</think>\n{command}" if thought else command


def _parse_tags(text: str) -> str | InvalidAction:
    if not _THOUGHT.search(text):
        return InvalidAction(reason="Expected a thought between <think> and </think>.")
    actions = _ACTION.findall(_THOUGHT.sub("", text, count=1))
    if len(actions) != 1 or not actions[0].strip():
        return InvalidAction(reason="Expected one command between <action> and </action>.")
    return actions[0].strip().lower()


def _turn_tags(command: str, thought: str) -> str:
    return f"<think>{thought}</think><action>{command}</action>"


_AIM = """\
You are in a household and have a task to carry out there. Give one command a turn and read what \
comes of it. You can carry one object at a time, and what is closed shows its contents once it is \
opened. Commands look like these:
go to desk 1, open drawer 2, close drawer 2, take mug 1 from desk 1, move mug 1 to shelf 2, \
clean mug 1 with sinkbasin 1, heat mug 1 with microwave 1, cool mug 1 with fridge 1, \
use desklamp 1, examine mug 1, look, inventory."""

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="plain",
            instructions="",
            parse=_parse_plain,
            turn=_turn_plain,
            max_turns=24,
        ),
        Protocol(
            name="bpo",
            instructions=f"{_AIM}\n\nYou may think first, between <think> and </think>. Then write "
            "the command alone on one line.",
            parse=_parse_chat,
            turn=_turn_chat,
            max_turns=40,
        ),
        Protocol(
            name="gigpo",
            instructions=f"{_AIM}\n\nThink first, between <think> and </think>. Then write one of "
            "the admissible commands between <action> and </action>.",
            parse=_parse_tags,
            turn=_turn_tags,
            lists_admissible=True,
            win_reward=10.0,
            invalid_penalty=0.1,
            max_turns=50,
        ),
    )
}


def with_admissible(text: str, commands: Sequence[str]) -> str:
    """An observation followed by the commands that do something; `help` is not worth a turn."""
    listed = "\n".join(command for command in commands if command != "help")
    return f"{text}\n\nAdmissible commands:\n{listed}"
