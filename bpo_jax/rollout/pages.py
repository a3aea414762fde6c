"""Who holds which page of the key-value pool: reference counts, a free list, nothing of a device.

A page has room for the keys and values of `PAGE` consecutive tokens of one branch, or of the past
that several branches share. Page 0 belongs to nobody: what padding computes is written there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PAGE = 16
"""Tokens in a page."""


class OutOfPages(RuntimeError):
    """Every page is held by some branch."""


class PagePool:
    """The accounts of a pool of pages.

    Args:
      pages: how many there are besides page 0.
      version: of the weights that pages are computed with from now on.
    """

    def __init__(self, pages: int, version: int = 0):
        if pages < 1:
            raise ValueError(f"pages={pages}: a pool has at least 1")
        self.pages = pages
        self.version = version
        self.most_used = 0
        self._holders = np.zeros(pages + 1, np.int32)
        self._versions = np.full(pages + 1, -1, np.int64)
        self._free = list(range(pages, 0, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds, each once however many share it."""
        return self.pages - self.free

    def take(self) -> int:
        """A page for one holder.

        Raises:
          OutOfPages: none is free.
        """
        if not self._free:
            raise OutOfPages(f"all {self.pages} pages are in use")
        page = self._free.pop()
        self._holders[page] = 1
        self._versions[page] = self.version
        self.most_used = max(self.most_used, self.used)
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to every page."""
        for page in pages:
            self._check(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from every page; a page without any is free again."""
        for page in pages:
            self._check(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold the page."""
        return int(self._holders[page])

    def current(self, pages: Iterable[int]) -> bool:
        """Whether all pages were computed with the present weights."""
        return all(self._versions[page] == self.version for page in pages)

    def _check(self, page: int) -> None:
        if not 0 < page <= self.pages or not self._holders[page]:
            raise ValueError(f"page {page} is held by nobody")


def pages_of(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE)
