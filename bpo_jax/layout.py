"""Where the tokens of a tree lie in a row: pieces in preorder, cut into parts that fit.

A *piece* is a run of tokens that always go together; it continues the last token of its parent.
The contexts that are read as a whole (the root's, and those of fresh decisions) form a trie: what
several begin with is one piece. Below the end of its context hangs each action of a decision, and
with an action goes what is appended after it. A fresh context shares with other such contexts only,
never with what was sampled, so every sampled token belongs to its own action and to nothing else.

Pieces lie in preorder, at every junction the one with the longest path below first, so that what is
seen from far away lies close. Actions below which no return exists (every trajectory was masked by
a failure) are left out, and so are contexts that nothing but they have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from bpo_jax.tree import Decision, Tree


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Piece:
    """Tokens that always go together.

    Attributes:
      ids: int32 [n].
      sampled: the first so many of them are the action's, the others are read.
      action_id: index in ``tree.actions()``; -1 where nothing is sampled.
      parent: index of the piece this one continues; -1 where nothing was read before.
    """

    ids: np.ndarray
    sampled: int
    action_id: int
    parent: int


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Part:
    """Pieces that fit a row, parents counted among themselves.

    Attributes:
      pieces: in preorder.
      trained: of each, whether its action is trained here; elsewhere it is mere context.
      length: tokens.
    """

    pieces: list[Piece]
    trained: list[bool]
    length: int


def lay_out(tree: Tree) -> list[Piece]:
    """The pieces of a tree in preorder, the longest-living first.

    Empty when no trajectory of the tree has a return.

    Raises:
      ValueError: a context that is read as a whole has no tokens.
    """
    returns = count_returns(tree)
    actions = tree.actions()
    kept = [d for d in tree.decisions() if any(returns[id(a)] for a in d.actions)]
    whole = [d for d in kept if d is tree.root or d.fresh]
    if any(not len(d.context_ids) for d in whole):
        raise ValueError(
            f"tree {tree.task_id!r} starts with a sampled token; there must be a prompt before it, "
            "in the root's context_ids and in those of every fresh decision"
        )
    appended = {id(d) for d in kept} - {id(d) for d in whole}
    pieces, ends = _trie([np.asarray(d.context_ids, np.int32) for d in whole])
    hangs = {id(d): end for d, end in zip(whole, ends, strict=True)}
    above = _decision_of_each_action(tree)
    for action_id, action in enumerate(actions):
        if not returns[id(action)]:
            continue
        ids = np.asarray(action.token_ids, np.int32)
        following = action.next
        if following is not None and id(following) in appended:
            hangs[id(following)] = len(pieces)
            if len(following.context_ids):
                ids = np.concatenate([ids, following.context_ids]).astype(np.int32)
        pieces.append(
            Piece(
                ids=ids,
                sampled=len(action.token_ids),
                action_id=action_id,
                parent=hangs[id(above[action_id])],
            )
        )
    return _preorder(pieces)


def split(
    tree: Tree, pieces: list[Piece], row_length: int, path_length: int | None = None
) -> list[Part]:
    """Cuts a layout into as few parts as fit rows, with as few tokens repeated as that allows.

    Parts are runs of leaves in layout order. Each repeats the path to its first leaf, as far as it
    shares it with the leaf before; every piece is trained in the first part that has it.

    Args:
      tree: named in errors.
      pieces: its layout.
      row_length: most tokens of a part.
      path_length: most tokens of one path, from the first token read to the last one sampled.

    Raises:
      ValueError: a path longer than a row or than its own cap. Nothing is ever cut from a path.
    """
    if not pieces:
        return []
    length = np.array([len(p.ids) for p in pieces])
    parent = np.array([p.parent for p in pieces])
    depth = _depths(pieces)
    longest = int(depth.max())
    if path_length is not None and longest > path_length:
        raise ValueError(
            f"tree {tree.task_id!r} has a path of {longest} tokens, but at most {path_length} are "
            "allowed: raise batch.path_length or lower the context limit of the rollout"
        )
    if longest > row_length:
        raise ValueError(
            f"tree {tree.task_id!r} has a trajectory of {longest} tokens, but a row holds "
            f"{row_length}: raise batch.row_length or lower the context limit of the rollout"
        )
    if length.sum() <= row_length:
        return [Part(pieces=pieces, trained=[True] * len(pieces), length=int(length.sum()))]
    leaf = np.setdiff1d(np.arange(len(pieces)), parent)
    # In preorder, what lies between two leaves is what the second does not share with the first.
    laid = np.cumsum(length)[leaf]
    shared = depth[leaf] - np.diff(laid, prepend=0)
    parts = []
    for first, last in _cut(laid, shared, row_length):
        new = range(int(leaf[first - 1]) + 1 if first else 0, int(leaf[last]) + 1)
        repeated = []
        at = pieces[new[0]].parent
        while at >= 0:
            repeated.append(at)
            at = pieces[at].parent
        indices = [*reversed(repeated), *new]
        renumbered = {-1: -1} | {old: index for index, old in enumerate(indices)}
        parts.append(
            Part(
                pieces=[
                    dataclasses.replace(pieces[i], parent=renumbered[pieces[i].parent])
                    for i in indices
                ],
                trained=[False] * len(repeated) + [True] * len(new),
                length=int(length[indices].sum()),
            )
        )
    return parts


def count_returns(tree: Tree) -> dict[int, int]:
    """For each action, by id: the trajectories through it that have a return."""
    count: dict[int, int] = {}
    for action in reversed(tree.actions()):
        if action.next is None:
            count[id(action)] = int(action.end != "masked")
        else:
            count[id(action)] = sum(count[id(a)] for a in action.next.actions)
    return count


def micro_batches(
    lengths: Sequence[int], rows: int, buckets: Sequence[int]
) -> list[tuple[int, list[list[int]]]]:
    """Which parts go into which rows of which micro-batches.

    Parts are put longest first into the first row with room for them. Rows that are about equally
    full make up a micro-batch, whose parts are then put once more into the shortest rows of a
    bucket that hold them.

    Args:
      lengths: tokens of each part.
      rows: most rows of a micro-batch.
      buckets: lengths its rows may have, ascending.

    Returns:
      Of each micro-batch the length of its rows, and the parts in each of them by their indices.
    """
    bins = _first_fit_decreasing(lengths, buckets[-1])
    if len(buckets) > 1:
        bins.sort(key=lambda members: -sum(lengths[i] for i in members))
    found = []
    for start in range(0, len(bins), rows):
        group = bins[start : start + rows]
        members = sorted(i for row in group for i in row)
        inside = [lengths[i] for i in members]
        for bucket in buckets[:-1]:
            if max(inside) <= bucket and sum(inside) <= rows * bucket:
                again = _first_fit_decreasing(inside, bucket)
                if len(again) <= rows:
                    found.append((bucket, [[members[i] for i in row] for row in again]))
                    break
        else:
            found.append((buckets[-1], group))
    return found


def _decision_of_each_action(tree: Tree) -> list[Decision]:
    above = {id(a): d for d in tree.decisions() for a in d.actions}
    return [above[id(a)] for a in tree.actions()]


def _trie(contexts: Sequence[np.ndarray]) -> tuple[list[Piece], list[int]]:
    """Contexts [n] as a compressed trie: its pieces, and the piece at whose end each one ends."""
    # Byte by byte, big-endian ids sort as sequences of ids do: what begins alike is together, and
    # first of all what is a beginning of others.
    order = sorted(range(len(contexts)), key=lambda i: contexts[i].astype(">i4").tobytes())
    shared = [0] + [_common(contexts[a], contexts[b]) for a, b in itertools.pairwise(order)]
    pieces: list[Piece] = []
    ends = [-1] * len(contexts)
    stack = [(0, len(order), 0, -1)]
    while stack:
        low, high, depth, here = stack.pop()
        if low == high:
            continue
        first = contexts[order[low]]
        end = min([len(first), *shared[low + 1 : high]])
        if end > depth:
            pieces.append(Piece(ids=first[depth:end], sampled=0, action_id=-1, parent=here))
            here = len(pieces) - 1
        while low < high and len(contexts[order[low]]) == end:
            ends[order[low]] = here
            low += 1
        cuts = [low, *(i for i in range(low + 1, high) if shared[i] == end), high]
        stack.extend((a, b, end, here) for a, b in itertools.pairwise(cuts))
    return pieces, ends


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _preorder(pieces: list[Piece]) -> list[Piece]:
    """Puts pieces, parents before children, in preorder: at each junction the longest path first.

    Of equally long ones the first sampled comes first.
    """
    reach = [len(p.ids) for p in pieces]
    earliest = [p.action_id if p.action_id >= 0 else len(pieces) for p in pieces]
    children: list[list[int]] = [[] for _ in range(len(pieces) + 1)]  # the last: of nothing
    longest_below = [0] * (len(pieces) + 1)
    for index in reversed(range(len(pieces))):
        above = pieces[index].parent
        reach[index] += longest_below[index]
        longest_below[above] = max(longest_below[above], reach[index])
        children[above].append(index)
        if above >= 0:
            earliest[above] = min(earliest[above], earliest[index])
    for below in children:
        # The reverse of the order, since the stack is popped from its end.
        below.sort(key=lambda i: (reach[i], -earliest[i]))
    place = [-1] * len(pieces)
    found: list[Piece] = []
    stack = list(children[-1])
    while stack:
        index = stack.pop()
        place[index] = len(found)
        found.append(pieces[index])
        stack.extend(children[index])
    for piece in found:
        piece.parent = place[piece.parent] if piece.parent >= 0 else -1
    return found


def _depths(pieces: list[Piece]) -> np.ndarray:
    """int64 [pieces], tokens from the first one read to the end of each piece."""
    depth: list[int] = []
    for piece in pieces:
        depth.append(len(piece.ids) + (depth[piece.parent] if piece.parent >= 0 else 0))
    return np.array(depth)


def _cut(laid: np.ndarray, shared: np.ndarray, capacity: int) -> list[tuple[int, int]]:
    """Cuts leaves into runs (first, last): as few as fit, then with as little repeated as possible.

    Args:
      laid: int64 [N], tokens laid out up to the end of each leaf.
      shared: int64 [N], tokens each shares with the one before it: repeated, if a run begins here.
      capacity: most tokens of a run. Each leaf alone fits.
    """
    count = len(laid)
    before = np.concatenate([[0], laid[:-1]])
    scale = int(shared.sum()) + 1
    # cost[i] of the runs that end just before leaf i, with the tokens that a run from i repeats.
    cost = np.zeros(count, np.int64)
    began = np.zeros(count, np.int64)
    low = 0
    for last in range(count):
        if last:
            cost[last] += shared[last]
        # Fewer leaves never need more room, so the first that fits only moves on.
        while laid[last] - before[low] + shared[low] > capacity:
            low += 1
        began[last] = low + int(np.argmin(cost[low : last + 1]))
        if last + 1 < count:
            cost[last + 1] = cost[began[last]] + scale
    runs = []
    last = count - 1
    while last >= 0:
        runs.append((int(began[last]), last))
        last = int(began[last]) - 1
    return runs[::-1]


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
