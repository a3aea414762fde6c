"""Trees as arrays of one fixed shape, and numbers of tokens back as numbers of actions.

The tokens of a tree are laid out in preorder, at every decision the action first whose longest
trajectory is longest, so that what is seen from far away lies close. A row holds as many trees as
fit. All that is below token k is the interval ``[k, subtree_end[k])``; a token's depth is its
position, and its prediction is read at its parent, which at a fork is not the token before it.

A tree longer than a row is split by its leaves. Each part repeats the path that leads to it as mere
context: every sampled token is trained in exactly one part. Actions below which no return exists
(every trajectory was masked by a failure) are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from bpo_jax.tree import Action, Decision, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TreeBatch:
    """Packed trees, every array [rows, row_length].

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


class Weighted(Protocol):
    """What `pack` needs of an estimate: numbers in the order of ``tree.actions()``."""

    @property
    def advantage(self) -> np.ndarray: ...

    @property
    def coefficient(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """The plainest `Weighted`: float64 [A] each."""

    advantage: np.ndarray
    coefficient: np.ndarray


@dataclasses.dataclass(eq=False)
class _Piece:
    """Tokens that always go together: an action and what the policy reads after it."""

    ids: np.ndarray
    sampled: int
    action_id: int
    parent: int
    first: int = -1  # the leaves below, in layout order, are those from first
    last: int = -1  # to last


def pack(
    trees: Sequence[Tree],
    estimates: Sequence[Weighted],
    *,
    rows: int,
    row_length: int,
    scale: float = 1.0,
    reference: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[TreeBatch]:
    """Packs trees into micro-batches that all have the shape [rows, row_length].

    Trees are put longest first into the first row with room for them. Trees without any return are
    skipped; when nothing is left the list is empty.

    Args:
      trees: finished trees.
      estimates: one each, aligned with ``tree.actions()``.
      rows: rows of a micro-batch; the last one is filled with padding rows.
      row_length: tokens of a row.
      scale: multiplies every coefficient: 1 / (prompts x constant) of the loss.
      reference: for each tree the reference policy's log-probs of each action's tokens.

    Raises:
      ValueError: a trajectory longer than a row, an estimate that does not fit its tree, a sampled
        token without log-probability, or nothing before the first sampled token.
    """
    if len(trees) != len(estimates):
        raise ValueError(f"{len(trees)} trees but {len(estimates)} estimates")
    if rows < 1 or row_length < 1:
        raise ValueError(f"rows={rows}, row_length={row_length}: both must be at least 1")
    parts = []
    for index, (tree, estimate) in enumerate(zip(trees, estimates, strict=True)):
        spread = _Spread(tree, estimate, None if reference is None else reference[index], scale)
        for pieces, trained in _split(tree, _layout(tree), row_length):
            parts.append(spread.part(index, pieces, trained))
    bins = _first_fit_decreasing([len(part["tokens"]) for part in parts], row_length)
    batches = []
    for start in range(0, len(bins), rows):
        batch = _padding(rows, row_length)
        for row, members in enumerate(bins[start : start + rows]):
            offset = 0
            for member in members:
                _place(batch, row, offset, parts[member])
                offset += len(parts[member]["tokens"])
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


def flatten(tree: Tree, estimate: Weighted) -> tuple[list[Tree], list[Weights]]:
    """Every trajectory as a tree of its own, with the same loss and gradient in sum.

    What a trainer without trees computes: an action shared by several trajectories is in each of
    them. It counts in the first and has coefficient 0 in the others, so the weighted sums over all
    tokens are those of the tree.
    """
    order = {id(action): index for index, action in enumerate(tree.actions())}
    coefficient = np.array(estimate.coefficient, np.float64)
    chains, weights = [], []
    for path in tree.paths():
        if path[-1].end == "masked":
            continue
        index = [order[id(action)] for action in path]
        weights.append(
            Weights(
                advantage=np.asarray(estimate.advantage, np.float64)[index],
                coefficient=coefficient[index],
            )
        )
        coefficient[index] = 0.0
        chains.append(_chain(tree, path))
    return chains, weights


def token_counts(tree: Tree) -> tuple[int, int]:
    """(tokens of the packed tree, tokens of its trajectories laid out one by one)."""
    pieces = _layout(tree)
    if not pieces:
        return 0, 0
    unique = sum(len(p.ids) for p in pieces)
    return unique, sum(len(p.ids) * (p.last - p.first + 1) for p in pieces)


def _chain(tree: Tree, path: Sequence[Action]) -> Tree:
    root = Decision(context_ids=tree.root.context_ids)
    at = root
    for action in path:
        following = None
        if action is not path[-1] and action.next is not None:
            following = Decision(context_ids=action.next.context_ids)
        at.actions = [dataclasses.replace(action, next=following)]
        at = following or at
    return Tree(task_id=tree.task_id, root=root, info=tree.info)


def _layout(tree: Tree) -> list[_Piece]:
    """The pieces of a tree in preorder, longest-living action first; the root context is piece 0.

    Empty when no trajectory of the tree has a return.
    """
    reach = _reach(tree)
    order = {id(action): index for index, action in enumerate(tree.actions())}
    pieces: list[_Piece] = []
    leaves = 0

    def below(decision: Decision | None, parent: int) -> list[tuple[Action, int]]:
        kept = [a for a in decision.actions if id(a) in reach] if decision is not None else []
        # Sorting is stable, so equal ones stay in the order they were sampled; popped from the end.
        kept.sort(key=lambda a: -reach[id(a)])
        return [(a, parent) for a in reversed(kept)]

    stack = below(tree.root, 0)
    if stack:
        root = np.asarray(tree.root.context_ids, np.int32)
        pieces.append(_Piece(ids=root, sampled=0, action_id=-1, parent=-1))
    while stack:
        action, parent = stack.pop()
        children = below(action.next, len(pieces))
        context = np.zeros(0, np.int32)
        if children and action.next is not None:
            context = action.next.context_ids
        piece = _Piece(
            ids=np.concatenate([action.token_ids, context]).astype(np.int32),
            sampled=len(action.token_ids),
            action_id=order[id(action)],
            parent=parent,
        )
        pieces.append(piece)
        if not children:
            piece.first = piece.last = leaves
            leaves += 1
        stack.extend(children)
    for piece in reversed(pieces[1:]):
        above = pieces[piece.parent]
        above.last = max(above.last, piece.last)
        above.first = piece.first
    return pieces


def _reach(tree: Tree) -> dict[int, int]:
    """Tokens of the longest trajectory from each action on, by id; without those with no return."""
    reach: dict[int, int] = {}
    for action in reversed(tree.actions()):
        if action.next is None:
            if action.end != "masked":
                reach[id(action)] = len(action.token_ids)
            continue
        longest = [reach[id(a)] for a in action.next.actions if id(a) in reach]
        if longest:
            here = len(action.token_ids) + len(action.next.context_ids)
            reach[id(action)] = here + max(longest)
    return reach


def _split(
    tree: Tree, pieces: list[_Piece], row_length: int
) -> list[tuple[list[_Piece], list[bool]]]:
    """Cuts a layout into parts that fit a row; returns (pieces, trained here) of each part."""
    if not pieces:
        return []
    whole = sum(len(p.ids) for p in pieces)
    if whole <= row_length:
        return [(pieces, [True] * len(pieces))]
    paths = _leaf_paths(pieces)
    chosen: list[list[int]] = []
    done: set[int] = set()
    current: set[int] = set()
    for path in paths:
        length = sum(len(pieces[i].ids) for i in path)
        if length > row_length:
            raise ValueError(
                f"tree {tree.task_id!r} has a trajectory of {length} tokens, but a row holds "
                f"{row_length}: raise batch.row_length or lower the context limit of the rollout"
            )
        grown = current | set(path)
        if current and sum(len(pieces[i].ids) for i in grown) > row_length:
            chosen.append(sorted(current))
            grown = set(path)
        current = grown
    chosen.append(sorted(current))
    parts = []
    for indices in chosen:
        renumbered = {old: new for new, old in enumerate(indices)}
        part = [
            dataclasses.replace(pieces[i], parent=renumbered.get(pieces[i].parent, -1))
            for i in indices
        ]
        parts.append((part, [i not in done for i in indices]))
        done.update(indices)
    return parts


def _leaf_paths(pieces: list[_Piece]) -> list[list[int]]:
    parents = {p.parent for p in pieces}
    paths = []
    for index in range(len(pieces)):
        if index not in parents:
            path = [index]
            while pieces[path[-1]].parent >= 0:
                path.append(pieces[path[-1]].parent)
            paths.append(path)
    return paths


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
        self.reference = reference
        self.advantage = self._numbers("advantage", estimate.advantage)
        self.coefficient = self._numbers("coefficient", estimate.coefficient) * scale
        if not len(tree.root.context_ids):
            raise ValueError(
                f"tree {self.name!r} starts with a sampled token; there must be a prompt before it"
            )
        if reference is not None and len(reference) != len(self.actions):
            raise ValueError(
                f"tree {self.name!r}: reference log-probs of {len(reference)} actions, "
                f"expected {len(self.actions)}"
            )

    def _numbers(self, what: str, values: np.ndarray) -> np.ndarray:
        values = np.asarray(values, np.float64)
        if values.shape != (len(self.actions),):
            raise ValueError(
                f"tree {self.name!r} has {len(self.actions)} actions, but its {what} has shape "
                f"{values.shape}"
            )
        if not np.all(np.isfinite(values)):
            raise ValueError(f"tree {self.name!r}: {what} is not finite: {values}")
        return values

    def part(
        self, tree_id: int, pieces: list[_Piece], trained: list[bool]
    ) -> dict[str, np.ndarray]:
        """The arrays of one part, indices counted from its own first token."""
        starts = np.concatenate([[0], np.cumsum([len(p.ids) for p in pieces])]).astype(np.int32)
        total = int(starts[-1])
        out = {name: column[0] for name, column in _padding(1, total).items()}
        out["tree_id"][:] = tree_id
        # In preorder the subtree of a piece ends where the last piece below it does.
        ends = starts[1:].copy()
        for index in reversed(range(len(pieces))):
            above = pieces[index].parent
            if above >= 0:
                ends[above] = max(ends[above], ends[index])
        depth_after, last_token = np.zeros((2, len(pieces)), np.int32)
        for index, piece in enumerate(pieces):
            here = slice(starts[index], starts[index + 1])
            above = piece.parent
            depth, before = (depth_after[above], last_token[above]) if above >= 0 else (0, -1)
            count = len(piece.ids)
            depth_after[index] = depth + count
            last_token[index] = starts[index + 1] - 1 if count else before
            out["tokens"][here] = piece.ids
            out["position"][here] = np.arange(depth, depth + count)
            out["parent"][here] = np.arange(starts[index] - 1, starts[index] + count - 1)
            out["parent"][here][:1] = before
            out["subtree_end"][here] = ends[index]
            sampled = slice(starts[index], starts[index] + piece.sampled)
            out["action_id"][sampled] = piece.action_id
            if trained[index] and piece.sampled:
                self._train(out, sampled, piece.action_id)
        return out

    def _train(self, out: dict[str, np.ndarray], where: slice, action_id: int) -> None:
        out["loss_mask"][where] = 1.0
        out["advantage"][where] = self.advantage[action_id]
        out["coefficient"][where] = self.coefficient[action_id]
        columns = {"behaviour_logprob": self.actions[action_id].logprobs}
        if self.reference is not None:
            columns["reference_logprob"] = self.reference[action_id]
        for name, values in columns.items():
            if len(values) != where.stop - where.start:
                raise ValueError(
                    f"tree {self.name!r}, action {action_id}: {where.stop - where.start} sampled "
                    f"tokens but {len(values)} numbers for {name}"
                )
            out[name][where] = values


def _padding(rows: int, length: int) -> dict[str, np.ndarray]:
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
    for name in (
        "loss_mask", "advantage", "coefficient", "behaviour_logprob", "reference_logprob"
    ):  # fmt: skip
        batch[name] = np.zeros(shape, np.float32)
    return batch


def _place(
    batch: dict[str, np.ndarray], row: int, offset: int, part: dict[str, np.ndarray]
) -> None:
    here = slice(offset, offset + len(part["tokens"]))
    for name, values in part.items():
        batch[name][row, here] = values
    batch["subtree_end"][row, here] += offset
    batch["parent"][row, here] += np.where(part["parent"] >= 0, offset, 0)


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (bin_ for bin_, left in enumerate(room) if lengths[index] <= left)
        number = next(fits, len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        bins[number].append(index)
        room[number] -= lengths[index]
    return bins
