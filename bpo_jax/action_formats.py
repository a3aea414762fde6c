"""How an action stands in a turn: what the policy is asked to write, and what is read from it.

A format is chosen by name, and belongs to the environment: its prompt explains it, its parsing
reads it, and its demonstrators write it.

What holds for all of them:

- One turn is one action. Two of them are refused, where others take the first (verl-agent, and
  ReAct by stopping there): what a policy writes after its first action, often what it imagines to
  come of it, would otherwise be executed or trained on as if it had been meant.
- Thoughts between <think> and </think> are nobody's action, whatever they mention; a chat template
  may have opened the first one already. One that is not closed, as at the limit of a turn, leaves
  no action; neither does an action that is not closed.
- Tags and labels count in any case, the names in a tool call as they are spelled. Whitespace around
  an action is none of it. Text around a tagged action is ignored; formats without tags take none.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvalidAction:
    """What a turn is when no action can be read from it.

    Attributes:
      reason: shown to the policy.
      penalty: what such a turn costs by the rules of the task.
    """

    reason: str
    penalty: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionFormat:
    """A way of writing actions.

    Attributes:
      name: what it is chosen by.
      instructions: a paragraph for the prompt; may be empty.
      parse: the action in a turn. Takes any text and never raises.
      compose: a turn of an action and a thought, which may be empty. `write` checks it.
      markers: texts at whose end the thought is over and the action is still open, so that a turn
        may branch there. A thought that mentions one branches there instead, which is as valid.
    """

    name: str
    instructions: str
    parse: Callable[[str], str | InvalidAction]
    compose: Callable[[str, str], str]
    markers: tuple[str, ...] = ()

    def write(self, action: str, thought: str = "") -> str:
        """A turn that `parse` reads as the action; what a policy is cloned from.

        Raises:
          ValueError: this format cannot say that: whitespace around the action, more lines than it
            has room for, or its own marks in the action or the thought.
        """
        turn = self.compose(action, thought)
        read = self.parse(turn)
        if read != action:
            got = read.reason if isinstance(read, InvalidAction) else f"it is read as {read!r}"
            raise ValueError(
                f"the action {action!r} cannot be written as {self.name}, {turn!r}: {got}"
            )
        return turn


def named(name: str) -> ActionFormat:
    """The format of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown action format {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_OPEN = re.compile(r"<think>", re.IGNORECASE)
_CLOSE = re.compile(r"</think>", re.IGNORECASE)


def _spoken(text: str) -> str | InvalidAction:
    """A turn without its thoughts."""
    opened, closed = _OPEN.search(text), _CLOSE.search(text)
    if closed and not (opened and opened.start() < closed.start()):
        text = text[closed.end() :]  # the thought was opened by the prompt
    said = _THOUGHT.sub("", text)
    if _OPEN.search(said):
        return InvalidAction(reason="The thought is not closed by </think>.")
    if _CLOSE.search(said):
        return InvalidAction(reason="A </think> closes no thought.")
    return said


def _think(thought: str) -> str:
    return f"<think>{thought}</think>\n" if thought else ""


# plain: the whole turn.


def _parse_plain(text: str) -> str | InvalidAction:
    return text.strip()


def _compose_plain(action: str, thought: str) -> str:
    return action


# think_line: a line of its own, after a thought or alone.


def _parse_line(text: str) -> str | InvalidAction:
    said = _spoken(text)
    if isinstance(said, InvalidAction):
        return said
    lines = [line.strip() for line in said.split("\n") if line.strip()]
    if len(lines) != 1:
        return InvalidAction(reason=f"Expected one line with an action, got {len(lines)} lines.")
    return lines[0]


def _compose_line(action: str, thought: str) -> str:
    return _think(thought) + action


# think_action: both in tags.

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_OPEN_ACTION = re.compile(r"<action>", re.IGNORECASE)


def _parse_tags(text: str) -> str | InvalidAction:
    said = _spoken(text)
    if isinstance(said, InvalidAction):
        return said
    if not _CLOSE.search(text):
        return InvalidAction(reason="Expected a thought between <think> and </think>.")
    opened, actions = len(_OPEN_ACTION.findall(said)), _ACTION.findall(said)
    if opened > 1:
        return InvalidAction(reason=f"Expected one action, got {opened}.")
    if opened and not actions:
        return InvalidAction(reason="The action is not closed by </action>.")
    if not actions or not actions[0].strip():
        return InvalidAction(reason="Expected an action between <action> and </action>.")
    return actions[0].strip()


def _compose_tags(action: str, thought: str) -> str:
    return f"<think>{thought}</think><action>{action}</action>"


# react: a line for each, named.

_LABEL = re.compile(r"^[ \t]*action(?:[ \t]+\d+)?[ \t]*:", re.MULTILINE | re.IGNORECASE)


def _parse_react(text: str) -> str | InvalidAction:
    said = _spoken(text)
    if isinstance(said, InvalidAction):
        return said
    labels = list(_LABEL.finditer(said))
    if len(labels) > 1:
        return InvalidAction(reason=f"Expected one action, got {len(labels)}.")
    action = said[labels[0].end() :].strip() if labels else ""
    if not action:
        return InvalidAction(reason="Expected a line that begins with Action: and gives an action.")
    if "\n" in action:
        return InvalidAction(reason="Expected nothing after the line with the action.")
    return action


def _compose_react(action: str, thought: str) -> str:
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


# tool_call and tool_json: the only argument of the only tool, in JSON. Qwen puts the call between
# tags and names its values "arguments"; Llama 3.1 sends it alone and names them "parameters". Both
# are read wherever one is; the formats differ in what they ask for and write.

TOOL, ARGUMENT = "act", "action"
_CALL = re.compile(r"<tool_call>", re.IGNORECASE)
_CALL_END = re.compile(r"\s*</tool_call>", re.IGNORECASE)
_PYTHON_TAG = "<|python_tag|>"
_SHAPE = f'{{"name": "{TOOL}", "arguments": {{"{ARGUMENT}": "..."}}}}'


def _parse_tool(text: str) -> str | InvalidAction:
    said = _spoken(text)
    if isinstance(said, InvalidAction):
        return said
    calls = list(_CALL.finditer(said))
    if len(calls) > 1:
        return InvalidAction(reason=f"Expected one tool call, got {len(calls)}.")
    body = said[calls[0].end() :] if calls else said.strip().removeprefix(_PYTHON_TAG)
    body = body.lstrip()
    if not body.startswith("{"):
        return InvalidAction(reason=f"Expected a tool call: {_SHAPE}.")
    try:
        call, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        return InvalidAction(reason=f"The tool call is no complete JSON; expected {_SHAPE}.")
    rest = body[end:]
    if calls and not _CALL_END.match(rest):
        return InvalidAction(reason="The tool call is not closed by </tool_call>.")
    if not calls and rest.strip():
        return InvalidAction(reason="Expected nothing after the tool call.")
    return _argument(call)


def _argument(call: dict[str, Any]) -> str | InvalidAction:
    if call.get("name") != TOOL:
        return InvalidAction(reason=f"Unknown tool; the only one is {TOOL}.")
    given = call.get("arguments", call.get("parameters"))
    action = given.get(ARGUMENT) if isinstance(given, dict) and len(given) == 1 else None
    if not isinstance(action, str) or not action.strip():
        return InvalidAction(reason=f"Expected one argument, {ARGUMENT}, with a text: {_SHAPE}.")
    try:
        action.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only JSON's escapes can spell
        return InvalidAction(reason=f"{ARGUMENT} holds an escape that is no character.")
    return action.strip()


def _compose_call(action: str, thought: str) -> str:
    call = json.dumps({"name": TOOL, "arguments": {ARGUMENT: action}}, ensure_ascii=False)
    return f"{_think(thought)}<tool_call>\n{call}\n</tool_call>"


def _compose_json(action: str, thought: str) -> str:
    call = json.dumps({"name": TOOL, "parameters": {ARGUMENT: action}}, ensure_ascii=False)
    return _think(thought) + call


# bash_block: fenced lines.

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\r?")
_SHELLS = ("bash", "sh")
_UNCLOSED_BLOCK = InvalidAction(reason="A block is not closed by a line with ```.")


def _parse_bash(text: str) -> str | InvalidAction:
    said = _spoken(text)
    if isinstance(said, InvalidAction):
        return said
    blocks: list[list[str]] = []
    language = None  # of the block that is open
    for line in said.split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence and language is not None and fence[1]:
            return _UNCLOSED_BLOCK  # another one cannot open inside it
        if fence:
            language = fence[1].lower() if language is None else None
            if language in _SHELLS:
                blocks.append([])
        elif language in _SHELLS:
            blocks[-1].append(line)
    if language is not None:
        return _UNCLOSED_BLOCK
    if len(blocks) != 1:
        return InvalidAction(reason=f"Expected one block opened by ```bash, got {len(blocks)}.")
    return "\n".join(blocks[0]).strip() or InvalidAction(reason="The block of commands is empty.")


def _compose_bash(action: str, thought: str) -> str:
    return (f"{thought}\n\n" if thought else "") + f"```bash\n{action}\n```"


FORMATS = {
    form.name: form
    for form in (
        ActionFormat(
            name="plain",
            instructions="",
            parse=_parse_plain,
            compose=_compose_plain,
        ),
        ActionFormat(
            name="think_line",
            instructions="You may think first, between <think> and </think>. Then write the action "
            "alone on one line.",
            parse=_parse_line,
            compose=_compose_line,
            markers=("</think>",),
        ),
        ActionFormat(
            name="think_action",
            instructions="Think first, between <think> and </think>. Then write one action between "
            "<action> and </action>.",
            parse=_parse_tags,
            compose=_compose_tags,
            markers=("<action>",),
        ),
        ActionFormat(
            name="react",
            instructions="Write what you think on a line that begins with Thought: and then one "
            "action on a line that begins with Action: and nothing after it.",
            parse=_parse_react,
            compose=_compose_react,
            markers=("\nAction:",),
        ),
        ActionFormat(
            name="tool_call",
            instructions=f"You have one tool, {TOOL}, with one argument, {ARGUMENT}, which is a "
            "text. You may think first, between <think> and </think>. Then call the tool once, "
            f"with one action: <tool_call>\n{_SHAPE}\n</tool_call>",
            parse=_parse_tool,
            compose=_compose_call,
            markers=("<tool_call>",),
        ),
        ActionFormat(
            name="tool_json",
            instructions=f"You have one tool, {TOOL}, with one argument, {ARGUMENT}, which is a "
            "text. You may think first, between <think> and </think>. Then call the tool once, "
            "with one action, by a JSON object and nothing else: "
            + _SHAPE.replace("arguments", "parameters"),
            parse=_parse_tool,
            compose=_compose_json,
            markers=('{"name"',),
        ),
        ActionFormat(
            name="bash_block",
            instructions="Say what you think, then give the commands of one action in one block "
            "that opens with a line ```bash and closes with a line ```. A line with ``` cannot "
            "stand inside it.",
            parse=_parse_bash,
            compose=_compose_bash,
            markers=("```bash",),
        ),
    )
}
