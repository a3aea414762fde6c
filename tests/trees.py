"""Random finished trees with tokens, for every test that packs, scores or trains."""

from __future__ import annotations

import numpy as np

from bpo_jax.packing import Weights
from bpo_jax.tree import Action, Decision, Tree


def random_tree(
    seed: int,
    *,
    roots: int = 2,
    turns: int = 4,
    max_children: int = 3,
    fork_rate: float = 0.3,
    masked_rate: float = 0.0,
    vocab: int = 64,
    fresh_rate: float = 0.0,
    window: int = 2,
    task_id: str | None = None,
) -> Tree:
    """A tree of at most `turns` actions in depth, with forks, nested ones included.

    Args:
      seed: of everything in it.
      roots: children of the root decision.
      turns: longest trajectory, in actions; trajectories end earlier with some probability.
      max_children: children of a fork.
      fork_rate: probability that a decision below the root is a fork.
      masked_rate: probability that a trajectory ends in a failure.
      vocab: token ids are below it.
      fresh_rate: probability that a decision below the root has a context of its own: the prompt
        and the last turns.
      window: how many turns such a context shows.
      task_id: named after the seed where None.
    """
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(0, vocab, rng.integers(low, high + 1)).astype(np.int32)

    def decision(left: int, turns: list[np.ndarray]) -> Decision:
        count = rng.integers(2, max_children + 1) if rng.random() < fork_rate else 1
        context = ids(0, 5)
        turns = turns[:-1] + [np.concatenate([turns[-1], context])]
        fresh = fresh_rate > 0 and rng.random() < fresh_rate
        if fresh:
            context = np.concatenate([prompt, *turns[-window:]])
        return Decision(
            context_ids=context,
            fresh=fresh,
            planned=int(count),
            actions=[action(left, turns) for _ in range(count)],
        )

    def action(left: int, turns: list[np.ndarray]) -> Action:
        tokens = ids(1, 4)
        turn = Action(
            token_ids=tokens,
            logprobs=-rng.exponential(1.0, len(tokens)).astype(np.float32),
            entropies=rng.uniform(0.0, 3.0, len(tokens)).astype(np.float32),
            reward=float(rng.integers(-2, 3)),
        )
        if left <= 1 or rng.random() < 0.15:
            kinds = ("masked", "done", "truncated")
            rates = (masked_rate, (1 - masked_rate) / 2, (1 - masked_rate) / 2)
            turn.end = kinds[rng.choice(3, p=rates)]
        else:
            turn.next = decision(left - 1, turns + [tokens])
        return turn

    prompt = ids(3, 8)
    root = Decision(
        context_ids=prompt, planned=roots, actions=[action(turns, []) for _ in range(roots)]
    )
    return Tree(task_id=task_id or f"random-{seed}", root=root)


def random_weights(tree: Tree, seed: int) -> Weights:
    """Advantages of both signs and positive coefficients."""
    rng = np.random.default_rng(seed)
    count = len(tree.actions())
    return Weights(advantage=rng.normal(size=count), coefficient=rng.uniform(0.1, 1.0, count))
