"""Asking many branches for the same thing, and waiting until all have answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bpo_jax.rollout.api import Answer, Branch, Engine, Turn


def read_all(engine: Engine, branches: Sequence[Branch]) -> np.ndarray:
    """float32 [branches]: the entropy of what each would say next, in nats."""
    for branch in branches:
        engine.read(branch)
    answers = _wait(engine, branches, lambda answer: answer.entropy is not None)
    return np.array([answers[b].entropy for b in branches], np.float32)


def say_all(
    engine: Engine,
    branches: Sequence[Branch],
    limits: Sequence[int],
    markers: Sequence[str] = (),
) -> list[Turn]:
    """A turn of each branch, of at most so many tokens."""
    for branch, limit in zip(branches, limits, strict=True):
        engine.say(branch, limit, markers)
    answers = _wait(engine, branches, lambda answer: answer.turn is not None)
    return [turn for b in branches if (turn := answers[b].turn) is not None]


def _wait(
    engine: Engine, branches: Sequence[Branch], wanted: Callable[[Answer], bool]
) -> dict[Branch, Answer]:
    missing, found = set(branches), {}
    while missing:
        for answer in engine.step():
            if answer.branch not in missing or not wanted(answer):
                raise RuntimeError(f"{answer} answers nothing that was asked")
            missing.remove(answer.branch)
            found[answer.branch] = answer
    return found
