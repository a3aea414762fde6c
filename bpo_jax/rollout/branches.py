"""The branches of an engine on the host: their tokens, and the pages that hold what is computed.

Forking is bookkeeping: the child holds the pages of its parent, the last one included. A page is
copied only when somebody is about to write into it while others hold it too, and then by the next
call to the device. When no page is left, the newest branch that can be spared gives up its own; its
tokens are computed again when it is its turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from bpo_jax.rollout.api import Branch, Ids
from bpo_jax.rollout.pages import PAGE, PagePool, pages_of


@dataclasses.dataclass(kw_only=True, eq=False)
class Line:
    """A branch.

    Attributes:
      branch: its handle; a larger one is newer.
      key: uint32 [2], of its random numbers.
      ids: all of its tokens.
      computed: how many of them are in pages.
      pages: that hold them, in order; the last one may have room left.
      trunk: tokens at the start that are read together with other branches, whole tiles.
      place: of its last hidden state, None where nothing is computed.
      entropy: of what follows the last token; None until that has been read.
    """

    branch: Branch
    key: np.ndarray
    ids: list[int]
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    trunk: int = 0
    place: int | None = None
    entropy: float | None = None

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.ids) - self.computed


class Branches:
    """All open branches, and who of them holds what.

    Args:
      slots: the most branches.
      pages: in the pool.
      tile: tokens of a trunk tile; 0 to share no computing.
      version: of the weights.
    """

    def __init__(self, *, slots: int, pages: int, tile: int, version: int):
        self.slots = slots
        self.pool = PagePool(pages, version)
        self.recomputed = 0
        """Tokens whose pages were given up."""
        self.copied = 0
        """Pages copied because a branch wrote into one that others held."""
        self._tile = tile
        self._lines: dict[Branch, Line] = {}
        self._next = 0
        # Place 0 belongs to nobody. A branch holds one at most, so there are always enough.
        self._places = list(range(slots + 1, 0, -1))
        self._place_holders = np.zeros(slots + 2, np.int32)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, branch: Branch) -> Line:
        try:
            return self._lines[branch]
        except KeyError:
            raise KeyError(f"branch {branch} is not open") from None

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def open(self, ids: Ids, seed: int) -> Line:
        """A branch with nothing computed.

        Raises:
          RuntimeError: no slot is free.
        """
        return self._add(Line(branch=self._next, key=_key(seed), ids=[int(i) for i in ids]))

    def fork(self, line: Line, seeds: Sequence[int]) -> list[Line]:
        """Branches that hold what `line` holds.

        Raises:
          RuntimeError: not enough free slots.
        """
        if len(seeds) > self.slots - len(self):
            raise RuntimeError(
                f"{len(seeds)} new branches, but {self.slots - len(self)} free slots"
            )
        if self._tile:
            line.trunk = line.computed // self._tile * self._tile
        children = []
        for seed in seeds:
            self.pool.share(line.pages)
            if line.place is not None:
                self._place_holders[line.place] += 1
            child = dataclasses.replace(
                line, branch=self._next, key=_key(seed), ids=list(line.ids), pages=list(line.pages)
            )
            children.append(self._add(child))
        return children

    def free(self, line: Line) -> None:
        """Ends a branch and gives back what it holds."""
        self.drop(line)
        del self._lines[line.branch]

    def drop(self, line: Line) -> None:
        """Takes a branch's pages away; all of its tokens are pending then."""
        self.pool.release(line.pages)
        line.pages, line.computed, line.trunk = [], 0, 0
        self._leave_place(line)

    def flush(self, version: int) -> None:
        """Takes all pages away, since they belong to older weights."""
        for line in self._lines.values():
            self.drop(line)
            line.entropy = None
        self.pool.version = version

    def rewind(self, line: Line, length: int) -> None:
        """Forgets the tokens of a branch beyond `length`; the last one left is pending."""
        del line.ids[length:]
        line.computed = min(line.computed, length - 1)
        if self._tile:
            line.trunk = min(line.trunk, line.computed // self._tile * self._tile)
        self.trim(line)

    def trim(self, line: Line) -> None:
        """Gives back pages beyond what is computed."""
        kept = pages_of(line.computed)
        self.pool.release(line.pages[kept:])
        del line.pages[kept:]

    def reserve(
        self, line: Line, tokens: int, spared: Collection[Line]
    ) -> list[tuple[int, int]] | None:
        """Makes room for the next `tokens` of a branch, in pages that nobody else holds.

        Args:
          line: the branch.
          tokens: how many will be written.
          spared: branches that may lose their pages for it; the newest goes first.

        Returns:
          The page to be copied first, as (source, target), in a list that is otherwise empty; None
          where there is no room.
        """
        needed = pages_of(line.computed + tokens) - len(line.pages)
        partial = bool(line.computed % PAGE) and self.pool.holders(line.pages[-1]) > 1
        victims = sorted((v for v in spared if v.pages), key=lambda v: v.branch)
        while self.pool.free < needed + partial:
            if not victims:
                return None
            victim = victims.pop()
            self.recomputed += victim.computed
            self.drop(victim)
            # The victim may have been the other holder of the last page.
            partial = bool(line.computed % PAGE) and self.pool.holders(line.pages[-1]) > 1
        copies = []
        if partial:
            old, new = line.pages[-1], self.pool.take()
            self.pool.release([old])
            line.pages[-1] = new
            copies.append((old, new))
            self.copied += 1
        line.pages += [self.pool.take() for _ in range(needed)]
        return copies

    def slots_of(self, line: Line, tokens: int) -> np.ndarray:
        """int32 [tokens]: where in the pool the next tokens go; `reserve` has made room."""
        position = line.computed + np.arange(tokens)
        pages = np.asarray(line.pages, np.int64)
        return (pages[position // PAGE] * PAGE + position % PAGE).astype(np.int32)

    def own_place(self, line: Line) -> int:
        """A place for the branch's next hidden state that nobody else holds."""
        if line.place is None or self._place_holders[line.place] > 1:
            self._leave_place(line)
            line.place = self._places.pop()
            self._place_holders[line.place] = 1
        return line.place

    def check(self) -> None:
        """Counts everything again.

        Raises:
          AssertionError: the accounts do not add up.
        """
        held = np.zeros(self.pool.pages + 1, np.int64)
        places = np.zeros_like(self._place_holders)
        for line in self._lines.values():
            assert len(line.pages) >= pages_of(line.computed), line
            assert line.trunk <= line.computed <= len(line.ids), line
            assert self.pool.current(line.pages), line
            np.add.at(held, line.pages, 1)
            if line.place is not None:
                places[line.place] += 1
        assert all(held[p] == self.pool.holders(p) for p in range(self.pool.pages + 1))
        assert self.pool.used == np.count_nonzero(held)
        assert np.array_equal(places, self._place_holders)
        assert len(self._places) == self.slots + 1 - np.count_nonzero(places)

    def _add(self, line: Line) -> Line:
        if len(self) >= self.slots:
            raise RuntimeError(f"all {self.slots} slots are in use; free a branch first")
        self._next += 1
        self._lines[line.branch] = line
        return line

    def _leave_place(self, line: Line) -> None:
        if line.place is not None:
            self._place_holders[line.place] -= 1
            if not self._place_holders[line.place]:
                self._places.append(line.place)
        line.place = None


def _key(seed: int) -> np.ndarray:
    """The two words of a threefry key."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
