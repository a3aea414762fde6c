"""Samples turns for many branches at once from a cache of dense rows.

A branch is a conversation in progress. Its tokens are opened or extended from outside, computed by
`Engine.prefill`, and sampled by `Engine.sample`: one compiled call samples every given branch until
each has met the stop token or its own limit, without a host trip per token.

Rows and their length grow and shrink in a few sizes, so that neither a half-empty batch nor the
unused end of a context is paid for, and nothing is compiled once these sizes have been seen. A
branch's tokens depend on its own seed and on its own context, not on the rest of the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
from flax import nnx

from bpo_jax.models import decoder
from bpo_jax.rollout import kv_cache, sampling

Branch = int
"""A handle given out by `Engine.open` and `Engine.fork`, never used twice."""

Ids = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One sampled turn.

    Attributes:
      token_ids: int32 [n], n >= 1, the stop token included where it was sampled.
      logprobs: float32 [n], under the distribution sampled from.
      entropies: float32 [n], of that distribution, in nats.
      finish: "stop", or "length" when the limit came first.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    finish: Literal["stop", "length"]

    @property
    def first_entropy(self) -> float:
        """Entropy of the distribution of the first token."""
        return float(self.entropies[0])


class Engine(Protocol):
    """What the grower needs of a sampler; another one may stand behind it."""

    temperature: float

    @property
    def free_slots(self) -> int:
        """How many more branches can be opened or forked now."""
        ...

    def open(self, prompt_ids: Ids, seed: int) -> Branch: ...

    def extend(self, branch: Branch, ids: Ids) -> None: ...

    def prefill(self, branches: Sequence[Branch]) -> np.ndarray: ...

    def sample(self, branches: Sequence[Branch], limits: Sequence[int]) -> list[Turn]: ...

    def fork(self, branch: Branch, seeds: Sequence[int]) -> list[Branch]: ...

    def free(self, branch: Branch) -> None: ...

    def length(self, branch: Branch) -> int: ...

    def set_weights(self, params: Any, version: int) -> None: ...


@dataclasses.dataclass(kw_only=True)
class _Line:
    """A branch: its row, the tokens in it, those still to be computed, and its key."""

    row: int
    pending: list[int]
    key: np.ndarray
    computed: int = 0


def default_row_sizes(slots: int) -> tuple[int, ...]:
    """`slots`, its quarter, and so on while that is at least 8; each one more compiles more."""
    sizes = [slots]
    while sizes[-1] >= 32:
        sizes.append(-(-sizes[-1] // 4))
    return tuple(reversed(sizes))


class DenseEngine:
    """An `Engine` with one dense cache row per branch.

    Args:
      graphdef: the static half of the decoder.
      config: its configuration.
      params: its parameters, a plain pytree.
      stop_id: the token that ends a turn.
      slots: how many branches can be open at once.
      context: the longest context of a branch, in tokens.
      max_turn_tokens: upper bound of every limit given to `sample`.
      temperature: of the sampling; 0 is greedy. It may be set at any time without a compilation.
      version: of the weights.
      row_sizes: batch sizes to compile for, ascending, the last one `slots`.
      length_step: cache lengths are multiples of it.
      chunk: tokens prefilled at a time.
    """

    def __init__(
        self,
        *,
        graphdef: nnx.GraphDef,
        config: decoder.DecoderConfig,
        params: decoder.Params,
        stop_id: int,
        slots: int,
        context: int,
        max_turn_tokens: int,
        temperature: float = 1.0,
        version: int = 0,
        row_sizes: Sequence[int] | None = None,
        length_step: int = 256,
        chunk: int = 32,
    ):
        if context > config.max_positions:
            raise ValueError(
                f"context={context} is beyond the model's max_positions={config.max_positions}"
            )
        self.row_sizes = tuple(row_sizes or default_row_sizes(slots))
        if list(self.row_sizes) != sorted(set(self.row_sizes)) or self.row_sizes[-1] != slots:
            raise ValueError(f"row_sizes={self.row_sizes}: ascending, and the last one {slots}")
        # A padded chunk may reach beyond the context; the decoder drops what does not fit.
        self.lengths = tuple(range(length_step, context, length_step)) + (context,)
        self.slots = slots
        self.context = context
        self.max_turn_tokens = max_turn_tokens
        self.temperature = temperature
        self.version = version
        self.stop_id = stop_id
        self._params = params
        self._chunk = chunk
        self._compiles = 0
        self._lines: dict[Branch, _Line] = {}
        self._next_branch = 0
        self._store = kv_cache.RowStore(config, self.row_sizes, self.lengths, self._counting_jit)

        def prefill_chunk(params, *args):
            return sampling.prefill_chunk(nnx.merge(graphdef, params), *args)

        def sample_turns(params, *args):
            model = nnx.merge(graphdef, params)
            return sampling.sample_turns(model, *args, stop_id=stop_id, width=max_turn_tokens)

        self._prefill = self._counting_jit(prefill_chunk, donate_argnums=1)
        self._sample = self._counting_jit(sample_turns, donate_argnums=1)

    # Branches.

    @property
    def free_slots(self) -> int:
        """How many more branches can be opened or forked now."""
        return self.slots - len(self._lines)

    @property
    def compiles(self) -> int:
        """How many functions have been compiled so far; constant in steady state."""
        return self._compiles

    def length(self, branch: Branch) -> int:
        """Tokens of the branch, those not yet computed included."""
        line = self._lines[branch]
        return line.computed + len(line.pending)

    def open(self, prompt_ids: Ids, seed: int) -> Branch:
        """Starts a branch whose context is `prompt_ids`.

        Args:
          prompt_ids: at least one token.
          seed: 64 bits; token t of the branch is a function of the seed, t and the context.

        Raises:
          RuntimeError: no slot is free.
          ValueError: an empty prompt, or one beyond the context.
        """
        if not len(prompt_ids):
            raise ValueError("an engine branch needs at least one prompt token")
        line = _Line(row=self._free_row(), pending=[], key=_key(seed))
        branch = self._add(line)
        self.extend(branch, prompt_ids)
        return branch

    def extend(self, branch: Branch, ids: Ids) -> None:
        """Appends tokens that were not sampled; they are computed by the next `prefill`.

        Raises:
          ValueError: the branch would outgrow the context.
        """
        total = self.length(branch) + len(ids)
        if total > self.context:
            raise ValueError(f"branch of {total} tokens: beyond the context of {self.context}")
        self._lines[branch].pending.extend(int(i) for i in ids)

    def fork(self, branch: Branch, seeds: Sequence[int]) -> list[Branch]:
        """New branches beside `branch`, one per seed, that share its past; it goes on itself.

        The branch must be prefilled; nothing of its past is computed again.

        Raises:
          RuntimeError: not enough free slots.
        """
        if len(seeds) > self.free_slots:
            raise RuntimeError(f"{len(seeds)} new branches, but {self.free_slots} free slots")
        line = self._lines[branch]
        if line.pending:
            raise ValueError(f"branch {branch} has tokens to prefill before it can fork")
        children = [
            self._add(dataclasses.replace(line, row=self._free_row(), pending=[], key=_key(seed)))
            for seed in seeds
        ]
        self._store.copy([line.row] * len(children), self._index(children))
        return children

    def free(self, branch: Branch) -> None:
        """Ends a branch and gives its slot back."""
        del self._lines[branch]

    def set_weights(self, params: decoder.Params, version: int) -> None:
        """Replaces the weights.

        Raises:
          RuntimeError: a branch is open; its cache belongs to the old weights.
        """
        if self._lines:
            raise RuntimeError(f"{len(self._lines)} branches are open while weights change")
        self._params = params
        self.version = version

    # Computing.

    def prefill(self, branches: Sequence[Branch]) -> np.ndarray:
        """Computes the tokens appended to the branches since they were last computed.

        Returns:
          float32 [branches]: the entropy of the next token's distribution at the temperature.
        """
        self._fit()
        waiting = [b for b in branches if self._lines[b].pending]
        entropies = {}
        while waiting:
            entropies.update(self._prefill_group(waiting))
            waiting = [b for b in waiting if self._lines[b].pending]
        missing = [b for b in branches if b not in entropies]
        if missing:
            entropies.update(self._prefill_group(missing))
        return np.array([entropies[b] for b in branches], np.float32)

    def sample(self, branches: Sequence[Branch], limits: Sequence[int]) -> list[Turn]:
        """Samples one turn for each branch.

        Branches with tokens not yet computed are prefilled first. The last token of a turn is not
        computed here but with what follows it.

        Args:
          branches: distinct branches.
          limits: the most tokens each may sample, 1 to `max_turn_tokens`.

        Raises:
          ValueError: a limit out of range or beyond what is left of the context.
        """
        for branch, limit in zip(branches, limits, strict=True):
            room = min(self.max_turn_tokens, self.context - self.length(branch))
            if not 1 <= limit <= room:
                raise ValueError(f"limit={limit}: the branch has room for 1 to {room} tokens")
        if any(self._lines[b].pending for b in branches):
            self.prefill(branches)
        self._fit()
        sampled: dict[Branch, list[tuple[np.ndarray, ...]]] = {b: [] for b in branches}
        left = dict(zip(branches, limits, strict=True))
        live = list(branches)
        while live:
            self._sample_group(live, left, sampled)
            live = [b for b in live if left[b]]
        turns = []
        for branch in branches:
            ids, logprobs, entropies = map(np.concatenate, zip(*sampled[branch], strict=True))
            stopped = int(ids[-1]) == self.stop_id
            self._lines[branch].pending = [int(ids[-1])]
            turns.append(
                Turn(
                    token_ids=ids,
                    logprobs=logprobs,
                    entropies=entropies,
                    finish="stop" if stopped else "length",
                )
            )
        return turns

    def warmup(self) -> int:
        """Compiles for every size of batch and length; returns the number of compilations.

        Raises:
          RuntimeError: branches are open.
        """
        if self._lines:
            raise RuntimeError("warm up before branches are opened")
        before = self._compiles
        for length in self.lengths:
            for size in self.row_sizes:
                self._store.warmup(size, length)
                for part in self.row_sizes[: self.row_sizes.index(size) + 1]:
                    work = self._store.checkout([], part)
                    start, count, key = self._row_arguments([], part)
                    tokens = np.zeros((part, self._chunk), np.int32)
                    heat, enough = self._heat(), np.int32(0)
                    work, _ = self._prefill(self._params, work, tokens, start, count, heat)
                    work, _ = self._sample(self._params, work, start, count, key, heat, enough)
                    self._store.checkin(work, [], part)
        return self._compiles - before

    # Rows on the device.

    def _add(self, line: _Line) -> Branch:
        branch = self._next_branch
        self._next_branch += 1
        self._lines[branch] = line
        return branch

    def _free_row(self) -> int:
        if not self.free_slots:
            raise RuntimeError(f"all {self.slots} slots are in use; free a branch first")
        store = self._store
        taken = {line.row for line in self._lines.values()}
        free = next((r for r in range(store.size) if r not in taken), store.size)
        if free == store.size:
            store.resize(range(free), kv_cache.fitting(self.row_sizes, free + 1), store.length)
        return free

    def _fit(self) -> None:
        """Gives the cache the smallest size in which every open branch has room for a turn."""
        lines = list(self._lines.values())
        longest = max((self.length(b) for b in self._lines), default=0) + self.max_turn_tokens
        length = kv_cache.fitting(self.lengths, min(longest, self.context))
        size = kv_cache.fitting(self.row_sizes, max(len(lines), 1))
        index: Sequence[int] = range(self._store.size)
        if size < self._store.size:
            index = [line.row for line in lines]
            for row, line in enumerate(lines):
                line.row = row
        self._store.resize(index, size, length)

    def _index(self, branches: Sequence[Branch]) -> list[int]:
        return [self._lines[b].row for b in branches]

    def _seats(self, branches: Sequence[Branch], size: int) -> list[int]:
        """Where each branch sits in the batch that `_checkout` returns."""
        if size == self._store.size:
            return self._index(branches)
        return list(range(len(branches)))

    def _row_arguments(
        self, branches: Sequence[Branch], size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, count of tokens and key of every row of a batch; rows of others count 0."""
        start = np.zeros(size, np.int32)
        count = np.zeros(size, np.int32)
        key = np.zeros((size, 2), np.uint32)
        if size == self._store.size:
            # What a row that sits out computes must land beyond its own tokens.
            for line in self._lines.values():
                start[line.row] = line.computed
        for seat, branch in zip(self._seats(branches, size), branches, strict=True):
            start[seat] = self._lines[branch].computed
            key[seat] = self._lines[branch].key
        return start, count, key

    def _heat(self) -> np.float32:
        return np.float32(self.temperature)

    def _prefill_group(self, branches: Sequence[Branch]) -> dict[Branch, float]:
        """Computes one chunk for each branch; the entropies are of its state after that."""
        size = kv_cache.fitting(self.row_sizes, len(branches))
        seats = self._seats(branches, size)
        start, count, _ = self._row_arguments(branches, size)
        tokens = np.zeros((size, self._chunk), np.int32)
        for seat, branch in zip(seats, branches, strict=True):
            now = self._lines[branch].pending[: self._chunk]
            tokens[seat, : len(now)] = now
            count[seat] = len(now)
        work = self._store.checkout(self._index(branches), size)
        work, entropy = self._prefill(self._params, work, tokens, start, count, self._heat())
        self._store.checkin(work, self._index(branches), size)
        for seat, branch in zip(seats, branches, strict=True):
            line = self._lines[branch]
            line.computed += int(count[seat])
            line.pending = line.pending[self._chunk :]
        entropy = np.asarray(entropy)
        return {b: float(entropy[seat]) for seat, b in zip(seats, branches, strict=True)}

    def _sample_group(
        self,
        branches: Sequence[Branch],
        left: dict[Branch, int],
        sampled: dict[Branch, list[tuple[np.ndarray, ...]]],
    ) -> None:
        """Samples until the branches that are left fit the next smaller batch size."""
        size = kv_cache.fitting(self.row_sizes, len(branches))
        smaller = [s for s in self.row_sizes if s < size]
        seats = self._seats(branches, size)
        start, count, key = self._row_arguments(branches, size)
        for seat, branch in zip(seats, branches, strict=True):
            count[seat] = left[branch]
        work = self._store.checkout(self._index(branches), size)
        work, out = self._sample(
            self._params, work, start, count, key, self._heat(), np.int32(max(smaller, default=0))
        )
        self._store.checkin(work, self._index(branches), size)
        counts, *columns = (np.asarray(x) for x in out)
        for seat, branch in zip(seats, branches, strict=True):
            n = int(counts[seat])
            ids, logprobs, entropies = (column[seat, :n] for column in columns)
            sampled[branch].append((ids, logprobs, entropies))
            left[branch] = 0 if int(ids[-1]) == self.stop_id else left[branch] - n
            # All but the last token of a finished turn are in the cache.
            self._lines[branch].computed += n if left[branch] else n - 1

    def _counting_jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self._compiles += 1  # The body of a jitted function runs once per compilation.
            return function(*args, **kwargs)

        return jax.jit(traced, **options)


def _key(seed: int) -> np.ndarray:
    """The two words of a threefry key."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
