"""How a game and a policy talk: what the policy is told and shown, and what its turns earn.

``plain``: the whole turn is the command, and what is shown is the game's own text; for small
policies that are taught the game from nothing.
``bpo``: a chat with instructions; a turn may think between <think> and </think>, then comes the
command on a line of its own. As in the BPO paper the whole history stays in view.
``gigpo``: a turn is <think>…</think><action>…</action>, and every observation lists the admissible
commands. As in the GiGPO line of work (Feng et al., 2025), a win pays 10 and an unreadable turn
costs 0.1.

How an action stands in a turn is an action format of its own (`bpo_jax.action_formats`), and any
other may be chosen instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """A way of talking.

    Attributes:
      name: what it is chosen by.
      aim: what the policy is told beside how to write an action; may be empty.
      action_format: how an action stands in a turn, unless another format is asked for.
      lower_case: commands are read in lower case.
      lists_admissible: every observation lists the admissible commands.
      win_reward: paid for reaching the goal.
      invalid_penalty: what a turn costs in which no command can be read.
      max_turns: how long an episode lasts, unless another length is asked for.
    """

    name: str
    aim: str
    action_format: str
    lower_case: bool = False
    lists_admissible: bool = False
    win_reward: float = 1.0
    invalid_penalty: float = 0.0
    max_turns: int = 50


_AIM = """\
You are in a household and have a task to carry out there. Give one action a turn and read what \
comes of it. You can carry one object at a time, and what is closed shows its contents once it is \
opened. Actions look like these:
go to desk 1, open drawer 2, close drawer 2, take mug 1 from desk 1, move mug 1 to shelf 2, \
clean mug 1 with sinkbasin 1, heat mug 1 with microwave 1, cool mug 1 with fridge 1, \
use desklamp 1, examine mug 1, look, inventory."""

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="plain",
            aim="",
            action_format="plain",
            max_turns=24,
        ),
        Protocol(
            name="bpo",
            aim=_AIM,
            action_format="think_line",
            max_turns=40,
        ),
        Protocol(
            name="gigpo",
            aim=f"{_AIM}\nWhat is admissible is listed every turn; choose one of these commands.",
            action_format="think_action",
            lower_case=True,
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
