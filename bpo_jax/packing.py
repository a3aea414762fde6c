"""Trees as arrays of a few fixed shapes, and numbers of tokens back as numbers of actions.

A row holds as many trees as fit, laid out as `bpo_jax.layout` says: all that is below token k is
the interval ``[k, subtree_end[k])``; a token's depth is its position, and its prediction is read at
its parent, which at a fork is not the token before it.

A tree longer than a row is split by its leaves. Each part repeats the path that leads to it as mere
context: every sampled token is trained in exactly one part. Rows are gathered into micro-batches by
how full they are, and a micro-batch is as long as the smallest bucket that holds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from bpo_jax import layout
from bpo_jax.tree import Action, Decision, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TreeBatch:
    """Packed trees, every array [rows, tokens of a row].

    Attributes:
      tokens: int32, 0 in padding.
      position: int32, depth of the token in its trajectory.
      parent: int32, index in the row of the token this one continues; -1 at a root and in padding.
      subtree_end: int32, one past the last token below; in padding the token's own index, which
        makes it see nothing and be seen by nothing.
      loss_mask: float32, 1 at the tokens that are trained here.
      advantage: float32, of the token's action; 0 where not trained.
      coefficient: float32, what the token counts in the loss; 0 where not trained.
      behaviour_logprob: float32, log-probability when it was sampled; 0 where not trained.
      reference_logprob: float32, log-probability under the reference policy; 0 where not given.
      action_id: int32, index in ``tree.actions()``; -1 outside actions.
      tree_id: int32, index of the tree in the list that was packed; -1 in padding.
      proximal_logprob: float32, log-probability under the learner's policy before the update; None
        where the loss does not ask for it.
      value_target, value_prediction, value_weight: float32, what the critic should say at the
        token's parent, what it said before the update, and how much that counts; None without a
        critic. A decision's numbers stand at the first token of one of its actions, the weight is 0
        elsewhere.
    """

    tokens: Any
    position: Any
    parent: Any
    subtree_end: Any
    loss_mask: Any
    advantage: Any
    coefficient: Any
    behaviour_logprob: Any
    reference_logprob: Any
    action_id: Any
    tree_id: Any
    proximal_logprob: Any = None
    value_target: Any = None
    value_prediction: Any = None
    value_weight: Any = None


class Weighted(Protocol):
    """What `pack` needs of an estimate: numbers in the order of ``tree.actions()``.

    Those of a critic are in the order of ``tree.decisions()``, None where there is none.
    """

    @property
    def advantage(self) -> np.ndarray: ...

    @property
    def coefficient(self) -> np.ndarray: ...

    @property
    def value_target(self) -> np.ndarray | None: ...

    @property
    def value_prediction(self) -> np.ndarray | None: ...

    @property
    def value_weight(self) -> np.ndarray | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """The plainest `Weighted`: float64 [A] each, and [D] for a critic."""

    advantage: np.ndarray
    coefficient: np.ndarray
    value_target: np.ndarray | None = None
    value_prediction: np.ndarray | None = None
    value_weight: np.ndarray | None = None


def pack(
    trees: Sequence[Tree],
    estimates: Sequence[Weighted],
    *,
    rows: int,
    row_length: int,
    buckets: Sequence[int] = (),
    path_length: int | None = None,
    scale: float = 1.0,
    reference: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[TreeBatch]:
    """Packs trees into micro-batches of the shapes [rows, row_length] and [rows, bucket].

    How rows are filled says `layout.micro_batches`. Trees without any return are skipped; when
    nothing is left the list is empty.

    Args:
      trees: finished trees.
      estimates: one each, aligned with ``tree.actions()``.
      rows: rows of a micro-batch; the last one is filled with padding rows.
      row_length: most tokens of a row.
      buckets: other lengths the rows of a micro-batch may have, below `row_length`.
      path_length: most tokens of one path; None: no bound but `row_length`.
      scale: multiplies every coefficient and value weight: 1 / (prompts x constant) of the loss.
      reference: for each tree the reference policy's log-probs of each action's tokens.

    Raises:
      ValueError: a path longer than a row or `path_length`, an estimate that does not fit its tree,
        a sampled token without log-probability, or nothing before the first sampled token.
    """
    if len(trees) != len(estimates):
        raise ValueError(f"{len(trees)} trees but {len(estimates)} estimates")
    if rows < 1 or row_length < 1:
        raise ValueError(f"rows={rows}, row_length={row_length}: both must be at least 1")
    if any(not 1 <= bucket <= row_length for bucket in buckets):
        raise ValueError(f"buckets={tuple(buckets)}: expected 1 to row_length={row_length} each")
    critic = any(estimate.value_target is not None for estimate in estimates)
    parts = []
    for index, (tree, estimate) in enumerate(zip(trees, estimates, strict=True)):
        spread = _Spread(tree, estimate, None if reference is None else reference[index], scale)
        for part in layout.split(tree, layout.lay_out(tree), row_length, path_length):
            parts.append(spread.part(index, part))
    batches = []
    lengths = [len(part["tokens"]) for part in parts]
    for length, bins in layout.micro_batches(lengths, rows, sorted({*buckets, row_length})):
        batch = _padding(rows, length, critic)
        for row, members in enumerate(bins):
            offset = 0
            for member in members:
                _place(batch, row, offset, parts[member])
                offset += lengths[member]
        batches.append(TreeBatch(**batch))
    return batches


def unpack(
    trees: Sequence[Tree], batches: Iterable[TreeBatch], values: Iterable[Any]
) -> list[list[np.ndarray]]:
    """Gathers numbers of trained tokens by tree and action.

    Args:
      trees: the trees that were packed.
      batches: what `pack` returned for them.
      values: an array [rows, row_length] for each batch.

    Returns:
      For every tree, for every action of ``tree.actions()``, an array with one number a sampled
      token; NaN for actions that were left out.
    """
    found = [[np.full(len(a.token_ids), np.nan, np.float32) for a in t.actions()] for t in trees]
    for batch, value_bt in zip(batches, values, strict=True):
        trained_bt = np.asarray(batch.loss_mask) > 0
        value_bt = np.asarray(value_bt)
        for row in range(len(trained_bt)):
            where = np.flatnonzero(trained_bt[row])
            owner = np.stack([batch.tree_id[row, where], batch.action_id[row, where]], axis=1)
            # The tokens of an action are neighbours and in order.
            cuts = np.flatnonzero(np.any(np.diff(owner, axis=0), axis=1)) + 1
            for span in np.split(where, cuts):
                if len(span):
                    tree_id, action_id = batch.tree_id[row, span[0]], batch.action_id[row, span[0]]
                    found[tree_id][action_id][:] = value_bt[row, span]
    return found


def first_of_each_decision(tree: Tree, per_action: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers of decisions from those of tokens that were read at their parents.

    Args:
      tree: the tree.
      per_action: what `unpack` has of it.

    Returns:
      float64 [D], in the order of ``tree.decisions()``: the number of the first token of an action
      taken there; 0 where all actions were left out.
    """
    first = {id(a): x[0] for a, x in zip(tree.actions(), per_action, strict=True)}
    found = [[first[id(a)] for a in d.actions] for d in tree.decisions()]
    return np.asarray([next((x for x in xs if not np.isnan(x)), 0.0) for xs in found], np.float64)


def flatten(tree: Tree, estimate: Weighted) -> tuple[list[Tree], list[Weights]]:
    """Every trajectory as a tree of its own, with the same loss and gradient in sum.

    What a trainer without trees computes: an action shared by several trajectories is in each of
    them. It counts in the first and has coefficient 0 in the others, so the weighted sums over all
    tokens are those of the tree. A trajectory with fresh decisions is cut before each of them, so
    what comes out are sequences: a context read as a whole, and what was sampled and read after it.

    Returns:
      The sequences in the order of ``tree.paths()``, and what their actions count.
    """
    order = {id(action): index for index, action in enumerate(tree.actions())}
    advantage = np.asarray(estimate.advantage, np.float64)
    coefficient = np.array(estimate.coefficient, np.float64)
    chains, weights = [], []
    for path in tree.paths():
        if path[-1].end == "masked":
            continue
        contexts = [tree.root.context_ids]
        sequences: list[list[Action]] = [[]]
        for action in path:
            sequences[-1].append(action)
            if action.next is not None and action.next.fresh:
                contexts.append(action.next.context_ids)
                sequences.append([])
        for context, actions in zip(contexts, sequences, strict=True):
            index = [order[id(action)] for action in actions]
            weights.append(Weights(advantage=advantage[index], coefficient=coefficient[index]))
            coefficient[index] = 0.0
            root = _chain(context, actions)
            chains.append(Tree(task_id=tree.task_id, root=root, info=tree.info))
    return chains, weights


def token_counts(tree: Tree) -> tuple[int, int]:
    """(tokens of the packed tree, tokens of its sequences laid out one by one).

    The sequences are those of `flatten`. A tree that is split over rows takes more than the first,
    since paths are repeated; `fill` counts what is in the rows.
    """
    returns = layout.count_returns(tree)
    flat = 0
    for decision in tree.decisions():
        through = [returns[id(a)] for a in decision.actions]
        flat += len(decision.context_ids) * sum(through)
        flat += sum(len(a.token_ids) * n for a, n in zip(decision.actions, through, strict=True))
    return sum(len(piece.ids) for piece in layout.lay_out(tree)), flat


def fill(batches: Iterable[TreeBatch]) -> tuple[int, int]:
    """(tokens in rows, repeated ones included, tokens that rows have room for)."""
    tree_ids = [np.asarray(batch.tree_id) for batch in batches]
    return sum(int((ids >= 0).sum()) for ids in tree_ids), sum(ids.size for ids in tree_ids)


def _chain(context_ids: np.ndarray, actions: Sequence[Action]) -> Decision:
    at = root = Decision(context_ids=context_ids)
    for action in actions[:-1]:
        assert action.next is not None
        following = Decision(context_ids=action.next.context_ids)
        at.actions = [dataclasses.replace(action, next=following)]
        at = following
    last = actions[-1]
    at.actions = [dataclasses.replace(last, next=None, end=last.end or "done")]
    return root


class _Spread:
    """Spreads the numbers of one tree's actions over their tokens."""

    def __init__(
        self,
        tree: Tree,
        estimate: Weighted,
        reference: Sequence[np.ndarray] | None,
        scale: float,
    ):
        self.actions = tree.actions()
        self.name = tree.task_id
        self.advantage = self._numbers("advantage", estimate.advantage)
        self.coefficient = self._numbers("coefficient", estimate.coefficient) * scale
        self.columns = {"behaviour_logprob": [a.logprobs for a in self.actions]}
        if reference is not None:
            if len(reference) != len(self.actions):
                raise ValueError(
                    f"tree {self.name!r}: reference log-probs of {len(reference)} actions, "
                    f"expected {len(self.actions)}"
                )
            self.columns["reference_logprob"] = list(reference)
        self.critic: dict[str, np.ndarray] = {}
        if estimate.value_target is not None:
            # Each decision's numbers go to its first action that is laid out.
            decisions, returns = tree.decisions(), layout.count_returns(tree)
            order = {id(action): index for index, action in enumerate(self.actions)}
            kept = [[order[id(a)] for a in d.actions if returns[id(a)]] for d in decisions]
            carriers = [k[0] for k in kept if k]
            of_carrier = np.asarray([bool(k) for k in kept], bool)
            for name in _CRITIC:
                numbers = self._numbers(name, getattr(estimate, name), "decisions", len(decisions))
                self.critic[name] = np.zeros(len(self.actions))
                self.critic[name][carriers] = numbers[of_carrier]
            self.critic["value_weight"] *= scale

    def _numbers(
        self, what: str, values: np.ndarray, of: str = "actions", count: int | None = None
    ) -> np.ndarray:
        values = np.asarray(values, np.float64)
        count = len(self.actions) if count is None else count
        if values.shape != (count,):
            raise ValueError(
                f"tree {self.name!r} has {count} {of}, but its {what} has shape {values.shape}"
            )
        if not np.all(np.isfinite(values)):
            raise ValueError(f"tree {self.name!r}: {what} is not finite: {values}")
        return values

    def part(self, tree_id: int, part: layout.Part) -> dict[str, np.ndarray]:
        """The arrays of one part, indices counted from its own first token."""
        pieces, total = part.pieces, part.length
        counts = [len(p.ids) for p in pieces]
        starts, ends, before, depth = _places(pieces, counts)
        out: dict[str, np.ndarray] = {"tokens": np.concatenate([p.ids for p in pieces])}
        out["position"] = np.arange(total, dtype=np.int32) + np.repeat(depth - starts, counts)
        out["parent"] = np.arange(-1, total - 1, dtype=np.int32)
        some = np.array(counts) > 0
        out["parent"][starts[some]] = before[some]
        out["subtree_end"] = np.repeat(ends, counts)
        out["tree_id"] = np.full(total, tree_id, np.int32)
        # Each piece is two runs: what was sampled and what is read after it.
        runs = np.array([(p.sampled, n - p.sampled) for p, n in zip(pieces, counts, strict=True)])
        number = np.full(runs.shape, -1, np.int32)
        number[:, 0] = [p.action_id for p in pieces]
        out["action_id"] = np.repeat(number.ravel(), runs.ravel())
        number[~np.array(part.trained), 0] = -1
        trained = np.repeat(number.ravel(), runs.ravel())
        where = np.flatnonzero(trained >= 0)
        columns = {
            "loss_mask": np.float32(1.0),
            "advantage": self.advantage[trained[where]],
            "coefficient": self.coefficient[trained[where]],
        }
        chosen = [a for a in number[:, 0].tolist() if a >= 0]
        for name in self.columns:
            columns[name] = np.concatenate([self._fitting(name, a) for a in chosen])
        for name in _FLOATS:
            out[name] = np.zeros(total, np.float32)
            if name in columns:
                out[name][where] = columns[name]
        first = where[np.diff(trained[where], prepend=-1) != 0]
        for name, numbers in self.critic.items():
            out[name] = np.zeros(total, np.float32)
            out[name][first] = numbers[trained[first]]
        return out

    def _fitting(self, name: str, action_id: int) -> np.ndarray:
        numbers, count = self.columns[name][action_id], len(self.actions[action_id].token_ids)
        if len(numbers) != count:
            raise ValueError(
                f"tree {self.name!r}, action {action_id}: {count} sampled tokens but "
                f"{len(numbers)} numbers for {name}"
            )
        return numbers


def _places(pieces: Sequence[layout.Piece], counts: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Of each piece, int32: its first token, the end of its subtree, the token it continues, depth.

    The depth is the position of its first token.
    """
    starts = np.cumsum([0, *counts]).tolist()
    ends = starts[1:]
    # In preorder the subtree of a piece ends where the last piece below it does.
    for index in reversed(range(len(pieces))):
        above = pieces[index].parent
        if above >= 0:
            ends[above] = max(ends[above], ends[index])
    before: list[int] = []
    depth: list[int] = []
    last: list[int] = []
    for index, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        above = piece.parent
        before.append(last[above] if above >= 0 else -1)
        depth.append(depth[above] + counts[above] if above >= 0 else 0)
        last.append(starts[index + 1] - 1 if count else before[-1])
    return tuple(np.array(column, np.int32) for column in (starts[:-1], ends, before, depth))


_FLOATS = ("loss_mask", "advantage", "coefficient", "behaviour_logprob", "reference_logprob")
_CRITIC = ("value_target", "value_prediction", "value_weight")


def _padding(rows: int, length: int, critic: bool) -> dict[str, np.ndarray]:
    shape = (rows, length)
    own = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    batch: dict[str, np.ndarray] = {
        "tokens": np.zeros(shape, np.int32),
        "position": np.zeros(shape, np.int32),
        "parent": np.full(shape, -1, np.int32),
        "subtree_end": own.copy(),
        "action_id": np.full(shape, -1, np.int32),
        "tree_id": np.full(shape, -1, np.int32),
    }
    floats = (*_FLOATS, *_CRITIC) if critic else _FLOATS
    return batch | {name: np.zeros(shape, np.float32) for name in floats}


def _place(
    batch: dict[str, np.ndarray], row: int, offset: int, part: dict[str, np.ndarray]
) -> None:
    here = slice(offset, offset + len(part["tokens"]))
    for name, values in part.items():
        batch[name][row, here] = values
    batch["subtree_end"][row, here] += offset
    batch["parent"][row, here] += np.where(part["parent"] >= 0, offset, 0)
