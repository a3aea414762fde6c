"""Pages are held by whoever needs them, and by nobody else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.rollout.branches import Branches
from bpo_jax.rollout.pages import PAGE, OutOfPages, PagePool, pages_of


def test_a_page_is_free_again_when_its_last_holder_lets_go():
    pool = PagePool(2)
    a, b = pool.take(), pool.take()
    with pytest.raises(OutOfPages, match="2 pages"):
        pool.take()
    pool.share([a])
    pool.release([a, b])
    assert (pool.used, pool.holders(a), pool.holders(b)) == (1, 1, 0)
    pool.release([a])
    assert (pool.free, pool.most_used) == (2, 2)


@pytest.mark.parametrize("page", [0, 1, 3, -1])
def test_a_page_that_nobody_holds_cannot_be_shared_or_released(page):
    pool = PagePool(2)
    for change in (pool.share, pool.release):
        with pytest.raises(ValueError, match="held by nobody"):
            change([page])


def test_page_zero_is_never_given_out():
    pool = PagePool(5)
    assert sorted(pool.take() for _ in range(5)) == [1, 2, 3, 4, 5]


class Contents:
    """What a device would hold: the token in every slot of every page."""

    def __init__(self, pages: int):
        self.tokens = np.full((pages + 1) * PAGE, -1)

    def compute(self, branches: Branches, line, count: int, spared) -> bool:
        copies = branches.reserve(line, count, spared)
        if copies is None:
            return False
        for old, new in copies:
            self.tokens[new * PAGE :][:PAGE] = self.tokens[old * PAGE :][:PAGE]
        new = line.ids[line.computed : line.computed + count]
        self.tokens[branches.slots_of(line, count)] = new
        line.computed += count
        branches.own_place(line)
        return True

    def of(self, line) -> list[int]:
        slots = [line.pages[t // PAGE] * PAGE + t % PAGE for t in range(line.computed)]
        return self.tokens[slots].tolist()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "fork", "extend", "compute", "free", "rewind", "drop", "flush"]),
        st.integers(0, 2**30),
        st.integers(1, 70),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS, pages=st.integers(8, 24), tile=st.sampled_from([0, 16]))
def test_random_histories_leak_nothing_and_read_back_what_was_written(actions, pages, tile):
    branches = Branches(slots=6, pages=pages, tile=tile, version=0)
    contents, rng = Contents(pages), np.random.default_rng(len(actions))
    for kind, pick, size in actions:
        lines = list(branches)
        line = lines[pick % len(lines)] if lines else None
        if kind == "open" and len(branches) < 6:
            branches.open(rng.integers(0, 99, size), seed=pick)
        elif kind == "flush":
            branches.flush(branches.pool.version + 1)
        elif line is None:
            continue
        elif kind == "fork" and len(branches) < 6:
            branches.fork(line, [pick])
        elif kind == "extend":
            line.ids += rng.integers(0, 99, size).tolist()
        elif kind == "compute" and line.pending:
            spared = [x for x in lines if x is not line]
            fits = pages_of(line.computed + min(size, line.pending)) + 1 <= pages
            done = contents.compute(branches, line, min(size, line.pending), spared)
            # Alone on the pool every branch that fits goes on: nothing can be stuck.
            assert done or not fits
        elif kind == "free":
            branches.free(line)
        elif kind == "rewind" and len(line.ids) > 1:
            branches.rewind(line, max(1, len(line.ids) - size))
        elif kind == "drop":
            branches.drop(line)
        branches.check()
        for other in branches:
            assert contents.of(other) == other.ids[: other.computed]
    for line in list(branches):
        branches.free(line)
    branches.check()
    assert branches.pool.used == 0
