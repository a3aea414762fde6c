"""The contract between whoever grows trees and whoever samples from the policy.

An engine serves many *branches*, conversations in progress, and is driven by `Engine.step`. What is
wanted of a branch is asked for (`Engine.read`, `Engine.say`) and answered by a later step, in the
order in which things become ready: the grower never has to wait for one branch to go on with
another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

Branch = int
"""A handle given out by `Engine.open` and `Engine.fork`, never used twice."""

Ids = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A sampled turn, or the part of one up to a marker.

    Attributes:
      token_ids: int32 [n], n >= 1, the stop token included where it was sampled.
      logprobs: float32 [n], under the distribution sampled from.
      entropies: float32 [n], of that distribution, in nats.
      raw_logprobs: float32 [n], under ``softmax(logits / temperature)``, without truncation by
        top-k or top-p; None where nothing is truncated.
      finish: "stop" at the stop token, "marker" at the first token with which the text so far holds
        one of the markers asked for, "length" where the limit came before either.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    raw_logprobs: np.ndarray | None = None
    finish: Literal["stop", "marker", "length"]

    @property
    def first_entropy(self) -> float:
        """Entropy of the distribution of the first token."""
        return float(self.entropies[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a step has found out about one branch.

    Attributes:
      branch: that was asked about.
      entropy: of the next token's distribution in nats; the answer to `Engine.read`.
      turn: the answer to `Engine.say`.
    """

    branch: Branch
    entropy: float | None = None
    turn: Turn | None = None


class Engine(Protocol):
    """What the grower needs of a sampler; another one may stand behind it.

    Token t of a branch is a function of the branch's seed, of t and of the tokens before it.
    """

    temperature: float

    @property
    def free_slots(self) -> int:
        """How many more branches can be opened or forked now."""
        ...

    def open(self, prompt_ids: Ids, seed: int) -> Branch: ...

    def extend(self, branch: Branch, ids: Ids) -> None:
        """Appends tokens that were not sampled. The branch must not be asked for anything."""
        ...

    def fork(self, branch: Branch, seeds: Sequence[int]) -> list[Branch]:
        """New branches beside `branch`, one per seed, that share its past; it goes on itself.

        The branch must have been read, with nothing asked for since.
        """
        ...

    def free(self, branch: Branch) -> None: ...

    def length(self, branch: Branch) -> int: ...

    def read(self, branch: Branch) -> None:
        """Asks that what was appended be computed, for the entropy of what would be said next."""
        ...

    def say(self, branch: Branch, limit: int, markers: Sequence[str] = ()) -> None:
        """Asks for a turn of at most `limit` tokens; see `Turn.finish`."""
        ...

    def step(self) -> list[Answer]:
        """Computes a little for the branches that were asked for something.

        Returns:
          What became ready; often nothing. Without anything asked for it returns at once.
        """
        ...

    def set_weights(self, params: Any, version: int) -> None: ...
