"""ALFWorld: text games in a household, generated or official, played by a native engine.

Idea and official games: Shridhar et al., "ALFWorld: Aligning Text and Embodied Environments for
Interactive Learning", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpo_jax.environments.alfworld.environment import AlfworldEnvironment
from bpo_jax.environments.alfworld.generator import KINDS, Size

__all__ = ["AlfworldEnvironment", "make"]


def make(
    *,
    data: str | None = None,
    size: str | Size = "small",
    kinds: Sequence[str] = KINDS,
    held_out: int = 200,
    protocol: str = "plain",
    action_format: str | None = None,
    max_turns: int | None = None,
    expert_knows_homes: bool = False,
    expert_idleness: float = 0.0,
) -> AlfworldEnvironment:
    """The environment; the arguments are the attributes of `AlfworldEnvironment`.

    Args:
      data: None for generated games.
      size: of generated games.
      kinds: the kinds of task to play.
      held_out: number of generated games in each evaluation split.
      protocol: how game and policy talk.
      action_format: how an action stands in a turn; None for the protocol's own.
      max_turns: None for the protocol's own length.
      expert_knows_homes: whether the demonstrator searches the likely places first.
      expert_idleness: probability that one of the demonstrator's commands is idle; below 1.

    Raises:
      ValueError: if an argument is out of its range.
    """
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"expected max_turns of 1 or more, got {max_turns}")
    return AlfworldEnvironment(
        data=data or "",
        size=size,
        kinds=tuple(kinds),
        held_out=held_out,
        protocol=protocol,
        action_format=action_format or "",
        max_turns=max_turns or 0,
        expert_knows_homes=expert_knows_homes,
        expert_idleness=expert_idleness,
    )
