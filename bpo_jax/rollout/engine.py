"""Continuous batching over forkable pages: an `api.Engine` on one device.

Every `PagedEngine.step` is at most one call that prefills and one that samples. Branches join and
leave between any two calls; a call that samples makes a few tokens for every branch that is
speaking, without a trip to the host in between. Batches come in a few shapes, and nothing compiles
once these have been seen (`PagedEngine.warmup` sees them all).

Token t of a branch is a function of the branch's seed, of t and of the tokens before it. Within one
shape of batch that holds to the last bit, whatever else is in the batch; another shape may round
otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from bpo_jax.models import decoder
from bpo_jax.rollout import decoding, kv_cache, sampling
from bpo_jax.rollout.api import Answer, Branch, Ids, Turn
from bpo_jax.rollout.branches import Branches, Line
from bpo_jax.rollout.decoding import TILE
from bpo_jax.rollout.pages import PAGE, pages_of

LEAST_TILE_BYTES = 1 << 17
"""A tile with fewer bytes a layer is read by every row faster than it is read once in a loop."""
CALL_OVERHEAD = 64
"""What a prefill costs beside its tokens, in tokens; decides between shapes."""
MOST_PREFILLS = 4
"""Prefills in a row while branches that could speak wait."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes of batches; every combination is compiled when it is first met.

    Attributes:
      rows: numbers of branches sampled at once, ascending; the last one is the number of slots.
      past: lengths of a past in the workspace, in pages, ascending; the last holds the context.
      prefill: rows and tokens a row of a prefill, by rows ascending.
      steps: most tokens a row of one call that samples.
      window: columns for sampled tokens in the workspace, a multiple of `steps`.
    """

    rows: tuple[int, ...]
    past: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    steps: int = 16
    window: int = 64

    def __post_init__(self) -> None:
        for name in ("rows", "past", "prefill"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"shapes.{name}={values}: distinct and ascending")
        if not 1 <= self.steps <= self.window:
            raise ValueError(f"shapes.steps={self.steps}: from 1 to window={self.window}")


def default_shapes(slots: int, context: int) -> Shapes:
    """A few shapes for so many branches of such a length."""
    rows = [slots]
    while rows[-1] >= 32:
        rows.append(-(-rows[-1] // 4))
    most = pages_of(context)
    past = [most]
    while past[-1] > 24:
        past.append(-(-past[-1] * 5 // 8))
    shapes = {(min(r, slots), s) for r, s in ((1, 256), (4, 128), (16, 32))}
    by_rows = {r: max(s for q, s in shapes if q == r) for r, _ in shapes}
    return Shapes(
        rows=tuple(reversed(rows)),
        past=tuple(reversed(past)),
        prefill=tuple(sorted((r, min(s, most * PAGE)) for r, s in by_rows.items())),
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class _Ask:
    """What is wanted of a branch, and what has been sampled for it."""

    kind: Literal["read", "say"]
    limit: int = 0
    markers: tuple[str, ...] = ()
    ids: list[int] = dataclasses.field(default_factory=list)
    columns: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Seated:
    """The batch in the workspace.

    Attributes:
      work: on the device.
      seats: row of every branch that may go on in it.
      start: tokens of each row's past that were laid out, its trunk included.
      own: the part of them in the workspace.
      tiles: the rows' trunks.
      offset: columns of the window that are filled.
    """

    work: kv_cache.Workspace
    seats: dict[Branch, int]
    start: np.ndarray
    own: np.ndarray
    tiles: decoding.Tiles
    offset: int = 0

    @property
    def rows(self) -> int:
        return len(self.own)


class PagedEngine:
    """An `api.Engine` with a paged cache on one device.

    Args:
      graphdef: the static half of the decoder.
      config: its configuration.
      params: its parameters, a plain pytree, on the device to sample on.
      stop_ids: tokens that end a turn.
      slots: how many branches can be open at once.
      context: the longest context of a branch, in tokens.
      tokens: room in the pool; None: for every slot a whole context.
      temperature: of the sampling; 0 is greedy. This and the next two may be set at any time
        without a compilation.
      top_k: only the k most probable tokens are sampled; 0: all.
      top_p: of these the fewest that hold at least this probability; 1: all.
      decode: ids to text, for `say` with markers.
      version: of the weights.
      shapes: of batches; None: `default_shapes`.
      share: read what branches have in common since a fork once for all of them, where that pays;
        None: where a tile of it is large enough.
    """

    def __init__(
        self,
        *,
        graphdef: nnx.GraphDef,
        config: decoder.DecoderConfig,
        params: decoder.Params,
        stop_ids: Sequence[int],
        slots: int,
        context: int,
        tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        decode: Callable[[Sequence[int]], str] | None = None,
        version: int = 0,
        shapes: Shapes | None = None,
        share: bool | None = None,
    ):
        if context > config.max_positions:
            raise ValueError(
                f"context={context} is beyond the model's max_positions={config.max_positions}"
            )
        self.shapes = shapes or default_shapes(slots, context)
        if self.shapes.rows[-1] != slots or self.shapes.past[-1] < pages_of(context):
            raise ValueError(f"{self.shapes}: too small for {slots} slots of {context} tokens")
        tokens = slots * context if tokens is None else tokens
        pages = pages_of(tokens) + (slots if tokens == slots * context else 0)
        if pages < pages_of(context) + 1:
            raise ValueError(f"tokens={tokens}: less than one context of {context}")
        if share is None:
            share = kv_cache.bytes_per_token(config) * TILE // config.num_layers >= LEAST_TILE_BYTES
        self.slots, self.context = slots, context
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._params = params
        self._stop_ids = np.unique(np.asarray(stop_ids, np.int32))
        if not len(self._stop_ids):
            raise ValueError("stop_ids is empty: no turn would end")
        self._stops = frozenset(self._stop_ids.tolist())
        self._decode = decode
        self._branches = Branches(
            slots=slots, pages=pages, tile=TILE if share else 0, version=version
        )
        self._asks: dict[Branch, _Ask] = {}
        self._seated: _Seated | None = None
        self._prefills = 0
        self._compiles = 0
        self._pool = kv_cache.empty_pool(config, pages, slots + 2)
        window = self.shapes.window

        def prefill(params, *args):
            return decoding.prefill(nnx.merge(graphdef, params), *args)

        def sample(params, *args):
            return decoding.sample(nnx.merge(graphdef, params), *args, window=window)

        def load(pool, copies, pages_bn):
            pool = kv_cache.copy_pages(pool, copies)
            return pool, kv_cache.load(pool, pages_bn, window)

        self._prefill = self._counting_jit(prefill, donate_argnums=1)
        self._sample = self._counting_jit(sample, donate_argnums=(1, 2))
        self._load = self._counting_jit(load, donate_argnums=0)

    # Branches.

    @property
    def free_slots(self) -> int:
        """How many more branches can be opened or forked now."""
        return self.slots - len(self._branches)

    @property
    def compiles(self) -> int:
        """How many functions have been compiled so far; constant in steady state."""
        return self._compiles

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._branches.pool.version

    def stats(self) -> dict[str, int]:
        """Pages in use now and at most so far, pages copied, tokens computed again."""
        pool = self._branches.pool
        return {
            "pages": pool.used,
            "most_pages": pool.most_used,
            "copied_pages": self._branches.copied,
            "recomputed": self._branches.recomputed,
        }

    def length(self, branch: Branch) -> int:
        """Tokens of the branch, those not yet computed included."""
        return len(self._branches[branch].ids)

    def open(self, prompt_ids: Ids, seed: int) -> Branch:
        """Starts a branch whose context is `prompt_ids`; nothing is computed yet.

        Args:
          prompt_ids: at least one token.
          seed: 64 bits; token t of the branch is a function of the seed, t and the context.

        Raises:
          RuntimeError: no slot is free.
          ValueError: an empty prompt, or one beyond the context.
        """
        if not len(prompt_ids):
            raise ValueError("an engine branch needs at least one prompt token")
        self._check_length(len(prompt_ids))
        return self._branches.open(prompt_ids, seed).branch

    def extend(self, branch: Branch, ids: Ids) -> None:
        """Appends tokens that were not sampled.

        Raises:
          ValueError: the branch would outgrow the context, or is asked for something.
        """
        line = self._idle(branch)
        self._check_length(len(line.ids) + len(ids))
        line.ids += [int(i) for i in ids]
        line.entropy = None

    def fork(self, branch: Branch, seeds: Sequence[int]) -> list[Branch]:
        """New branches beside `branch`, one per seed, that share its past; it goes on itself.

        No tokens are copied or computed.

        Raises:
          RuntimeError: not enough free slots.
          ValueError: the branch has not been read since something was appended.
        """
        line = self._idle(branch)
        if line.entropy is None:
            raise ValueError(f"branch {branch} has to be read before it can fork")
        children = self._branches.fork(line, seeds)
        self._unseat(branch)  # its trunk may have grown
        return [child.branch for child in children]

    def free(self, branch: Branch) -> None:
        """Ends a branch, whatever it is asked for, and gives back its slot and its pages."""
        self._branches.free(self._branches[branch])
        self._asks.pop(branch, None)
        self._unseat(branch)

    def set_weights(self, params: decoder.Params, version: int) -> None:
        """Replaces the weights; whatever was computed with the old ones is computed again."""
        self._params = params
        self._seated = None
        self._branches.flush(version)

    # Asking.

    def read(self, branch: Branch) -> None:
        """Asks for the entropy of what would be said next."""
        self._idle(branch)
        self._asks[branch] = _Ask(kind="read")

    def say(self, branch: Branch, limit: int, markers: Sequence[str] = ()) -> None:
        """Asks for a turn of at most `limit` tokens.

        With markers it also ends with the first token after which its text holds one of them.

        Raises:
          ValueError: a limit out of range, or markers without a way to decode.
        """
        line = self._idle(branch)
        room = self.context - len(line.ids)
        if not 1 <= limit <= room:
            raise ValueError(f"limit={limit}: the branch has room for 1 to {room} tokens")
        if markers and self._decode is None:
            raise ValueError("markers are found in text: the engine was made without decode")
        self._asks[branch] = _Ask(kind="say", limit=limit, markers=tuple(markers))

    def step(self) -> list[Answer]:
        """Computes a little for the branches that were asked for something.

        Raises:
          FloatingPointError: the policy's probabilities are not finite.
        """
        answers = [
            Answer(branch=b, entropy=line.entropy)
            for b, ask in self._asks.items()
            if ask.kind == "read" and (line := self._branches[b]).entropy is not None
        ]
        for answer in answers:
            del self._asks[answer.branch]
        waiting = [line for line in self._asked() if self._must_prefill(line)]
        speaking = len(self._asks) - len(waiting)
        # Whoever has been read is about to speak: a call that samples costs much the same for few
        # branches as for many, so it waits for them, but not for ever.
        if waiting and not (speaking and self._prefills >= MOST_PREFILLS):
            self._prefills += 1
            return answers + self._prefill_some(waiting)
        if speaking and not answers:
            self._prefills = 0
            ready = [line for line in self._asked() if not self._must_prefill(line)]
            return self._sample_some(ready)
        return answers

    def warmup(self) -> int:
        """Compiles for every shape; returns the number of compilations.

        Raises:
          RuntimeError: branches are open.
        """
        if len(self._branches):
            raise RuntimeError("warm up before branches are opened")
        before = self._compiles
        for past in self.shapes.past:
            for rows, chunk in self.shapes.prefill:
                self._run_prefill(rows, chunk, past, [], [])
            for rows in self.shapes.rows:
                seated = self._seat(rows, past, [], [])
                self._run_sample(seated, [], {}, [])
        self._seated = None
        return self._compiles - before

    # Prefilling.

    def _must_prefill(self, line: Line) -> bool:
        return line.pending > 0 or line.place is None

    def _prefill_some(self, waiting: Sequence[Line]) -> list[Answer]:
        """One chunk for some of the branches."""
        rows, chunk = self._prefill_shape(waiting)
        batch: list[tuple[Line, int]] = []
        copies: list[tuple[int, int]] = []
        for line in waiting:
            if len(batch) == rows:
                break
            count = min(line.pending, chunk)
            copied = self._branches.reserve(line, count, self._spared(line, batch))
            if copied is not None:
                batch.append((line, count))
                copies += copied
        if not batch:
            return []
        past = _fitting(self.shapes.past, max(pages_of(line.computed) for line, _ in batch))
        entropies = self._run_prefill(rows, chunk, past, batch, copies)
        answers = []
        for (line, count), entropy in zip(batch, entropies.tolist(), strict=False):
            if not np.isfinite(entropy):
                raise _not_finite(line.branch)
            line.computed += count
            self._unseat(line.branch)
            if line.pending:
                continue
            line.entropy = entropy
            if self._asks[line.branch].kind == "read":
                del self._asks[line.branch]
                answers.append(Answer(branch=line.branch, entropy=entropy))
        return answers

    def _prefill_shape(self, waiting: Sequence[Line]) -> tuple[int, int]:
        """The shape that computes most for what it costs."""

        def yields(shape: tuple[int, int]) -> float:
            rows, chunk = shape
            done = sum(min(line.pending, chunk) for line in waiting[:rows])
            return done / (rows * chunk + CALL_OVERHEAD)

        return max(self.shapes.prefill, key=yields)

    def _run_prefill(
        self,
        rows: int,
        chunk: int,
        past: int,
        batch: Sequence[tuple[Line, int]],
        copies: Sequence[tuple[int, int]],
    ) -> np.ndarray:
        arrays = decoding.PrefillBatch(
            tokens=np.zeros((rows, chunk), np.int32),
            counts=np.zeros(rows, np.int32),
            start=np.zeros(rows, np.int32),
            pages=np.zeros((rows, past), np.int32),
            slots=np.zeros((rows, chunk), np.int32),
            place=np.zeros(rows, np.int32),
            copies=self._copies(copies),
        )
        for row, (line, count) in enumerate(batch):
            arrays.tokens[row, :count] = line.ids[line.computed : line.computed + count]
            arrays.counts[row], arrays.start[row] = count, line.computed
            held = pages_of(line.computed)
            arrays.pages[row, :held] = line.pages[:held]
            arrays.slots[row, :count] = self._branches.slots_of(line, count)
            arrays.place[row] = self._branches.own_place(line)
        self._pool, entropies = self._prefill(self._params, self._pool, arrays, self._heat())
        return np.asarray(entropies)

    # Sampling.

    def _sample_some(self, ready: Sequence[Line]) -> list[Answer]:
        """A few tokens for every branch that is speaking."""
        steps = self.shapes.steps
        batch: dict[Line, int] = {}
        copies: list[tuple[int, int]] = []
        for line in ready:
            if self._must_prefill(line):
                continue  # its pages were taken for an older one just now
            ask = self._asks[line.branch]
            count = min(steps, ask.limit - len(ask.ids))
            copied = self._branches.reserve(line, count, self._spared(line, batch))
            if copied is not None:
                batch[line] = count
                copies += copied
        if not batch:
            return []
        seated = self._seated
        if not self._can_go_on(batch):
            self._seated = None  # before another takes as much room
            rows = _fitting(self.shapes.rows, len(batch))
            past = max(pages_of(line.computed) - line.trunk // PAGE for line in batch)
            seated = self._seat(rows, _fitting(self.shapes.past, past), list(batch), copies)
            self._seated, copies = seated, []
        assert seated is not None
        # Columns that a row sits out are not its own.
        seated.seats = {line.branch: seated.seats[line.branch] for line in batch}
        smaller = [r for r in self.shapes.rows if r < _fitting(self.shapes.rows, len(batch))]
        made = self._run_sample(seated, smaller, batch, copies)
        answers = []
        for line in batch:
            answer = self._take_tokens(line, made, seated.seats[line.branch])
            if answer is not None:
                answers.append(answer)
        return answers

    def _can_go_on(self, batch: dict[Line, int]) -> bool:
        """Whether the workspace holds all rows of a batch, and has columns left for it."""
        seated = self._seated
        return (
            seated is not None
            and seated.offset + self.shapes.steps <= self.shapes.window
            and seated.rows == _fitting(self.shapes.rows, len(batch))
            and all(line.branch in seated.seats for line in batch)
        )

    def _seat(
        self,
        rows: int,
        past: int,
        lines: Sequence[Line],
        copies: Sequence[tuple[int, int]],
    ) -> _Seated:
        """Lays out a batch in a workspace."""
        # Rows that continue a tile lie side by side, since pages name what came before them.
        lines = sorted(lines, key=lambda x: (x.pages[: x.trunk // PAGE], x.branch))
        pages = np.zeros((rows, past), np.int32)
        start, own = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, line in enumerate(lines):
            mine = line.pages[line.trunk // PAGE : pages_of(line.computed)]
            pages[row, : len(mine)] = mine
            start[row], own[row] = line.computed, line.computed - line.trunk
        self._pool, work = self._load(self._pool, self._copies(copies), pages)
        return _Seated(
            work=work,
            seats={line.branch: row for row, line in enumerate(lines)},
            start=start,
            own=own,
            tiles=self._tiles(rows, lines),
        )

    def _tiles(self, rows: int, lines: Sequence[Line]) -> decoding.Tiles:
        per_tile = TILE // PAGE
        found: dict[tuple[int, ...], list[int]] = {}
        for row, line in enumerate(lines):
            for end in range(per_tile, line.trunk // PAGE + 1, per_tile):
                span = found.setdefault(tuple(line.pages[end - per_tile : end]), [row, row])
                span[1] = row + 1
        most = rows * (self.context // TILE) + 1
        tiles = decoding.Tiles(
            pages=np.zeros((most, per_tile), np.int32),
            first=np.zeros(most, np.int32),
            beyond=np.zeros(most, np.int32),
            number=np.int32(len(found)),
        )
        for index, (pages, (first, beyond)) in enumerate(found.items()):
            tiles.pages[index] = pages
            tiles.first[index], tiles.beyond[index] = first, beyond
        return tiles

    def _run_sample(
        self,
        seated: _Seated,
        smaller: Sequence[int],
        batch: dict[Line, int],
        copies: Sequence[tuple[int, int]],
    ) -> decoding.Sampled:
        rows, steps = seated.rows, self.shapes.steps
        arrays = decoding.SampleBatch(
            start=np.zeros(rows, np.int32),
            own=seated.own,
            limit=np.zeros(rows, np.int32),
            key=np.zeros((rows, 2), np.uint32),
            slots=np.zeros((rows, steps), np.int32),
            source=np.zeros(rows, np.int32),
            place=np.zeros(rows, np.int32),
            offset=np.int32(seated.offset),
            enough=np.int32(max(smaller, default=0)),
            tiles=seated.tiles,
            copies=self._copies(copies),
        )
        for line, count in batch.items():
            row = seated.seats[line.branch]
            ask = self._asks[line.branch]
            arrays.start[row], arrays.limit[row] = line.computed, ask.limit - len(ask.ids)
            arrays.key[row] = line.key
            arrays.slots[row, :count] = self._branches.slots_of(line, count)
            arrays.source[row] = line.place or 0
            arrays.place[row] = self._branches.own_place(line)
        self._pool, seated.work, made = self._sample(
            self._params, self._pool, seated.work, arrays, self._heat(), self._stop_ids
        )
        made = jax.tree.map(np.asarray, made)
        seated.offset += int(made.counts.max(initial=0))
        return made

    def _take_tokens(self, line: Line, made: decoding.Sampled, row: int) -> Answer | None:
        """Appends what was sampled; the answer where the turn is complete."""
        ask = self._asks[line.branch]
        n = int(made.counts[row])
        columns = tuple(x[row, :n] for x in (made.logprobs, made.entropies, made.raw_logprobs))
        if not all(np.isfinite(x).all() for x in columns[:2]):
            raise _not_finite(line.branch)
        new = made.ids[row, :n].tolist()
        before = len(ask.ids)
        ask.ids += new
        line.ids += new
        line.computed += n
        line.entropy = None
        finish: Literal["stop", "marker", "length"] | None = None
        if new and new[-1] in self._stops:
            finish = "stop"
        elif len(ask.ids) == ask.limit:
            finish = "length"
        if ask.markers:
            end = self._marker_end(ask, before)
            if end is not None:
                finish = "marker"
                columns = tuple(x[: end - before] for x in columns)
                del ask.ids[end:]
                new = ask.ids[before:]
        ask.columns.append(columns)
        if finish is None:
            return None
        self._branches.rewind(line, len(line.ids) - n + len(new))
        self._unseat(line.branch)
        del self._asks[line.branch]
        logprobs, entropies, raw = (
            np.concatenate(parts).astype(np.float32) for parts in zip(*ask.columns, strict=True)
        )
        truncated = self.top_k > 0 or self.top_p < 1.0
        turn = Turn(
            token_ids=np.array(ask.ids, np.int32),
            logprobs=logprobs,
            entropies=entropies,
            raw_logprobs=raw if truncated else None,
            finish=finish,
        )
        return Answer(branch=line.branch, turn=turn)

    def _marker_end(self, ask: _Ask, before: int) -> int | None:
        """How many tokens it takes until the text holds a marker; None where it does not."""
        assert self._decode is not None
        ids = ask.ids[:-1] if ask.ids[-1] in self._stops else ask.ids

        def holds(count: int) -> bool:
            text = self._decode(ids[:count])  # type: ignore[misc]
            return any(marker in text for marker in ask.markers)

        if not holds(len(ids)):
            return None
        # One more token may change the last characters, never those of a marker that is complete.
        return next(n for n in range(before + 1, len(ids) + 1) if holds(n))

    # Common to both.

    def _asked(self) -> list[Line]:
        """Branches that are asked for something, the oldest first."""
        return [self._branches[b] for b in sorted(self._asks)]

    def _spared(self, line: Line, batch: Any) -> list[Line]:
        """Branches that may lose their pages to `line`: idle ones, and newer ones.

        None that is in the batch already: the oldest that is asked for something always goes on.
        """
        chosen = {id(x[0] if isinstance(x, tuple) else x) for x in batch}
        return [
            other
            for other in self._branches
            if other is not line
            and id(other) not in chosen
            and (other.branch not in self._asks or other.branch > line.branch)
        ]

    def _idle(self, branch: Branch) -> Line:
        line = self._branches[branch]
        if branch in self._asks:
            raise ValueError(
                f"branch {branch} is asked for something already; step until it is done"
            )
        return line

    def _unseat(self, branch: Branch) -> None:
        if self._seated is not None:
            self._seated.seats.pop(branch, None)

    def _check_length(self, length: int) -> None:
        if length > self.context:
            raise ValueError(f"branch of {length} tokens: beyond the context of {self.context}")

    def _copies(self, copies: Sequence[tuple[int, int]]) -> kv_cache.Copies:
        source, target = np.zeros((2, self.slots), np.int32)
        for index, (old, new) in enumerate(copies):
            source[index], target[index] = old, new
        return kv_cache.Copies(source, target, np.int32(len(copies)))

    def _heat(self) -> sampling.Heat:
        return sampling.Heat(
            np.float32(self.temperature), np.int32(self.top_k), np.float32(self.top_p)
        )

    def _counting_jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self._compiles += 1  # The body of a jitted function runs once per compilation.
            return function(*args, **kwargs)

        return jax.jit(traced, **options)


def _fitting(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of the ascending `sizes` that is at least `wanted`."""
    return next(s for s in sizes if s >= wanted)


def _not_finite(branch: Branch) -> FloatingPointError:
    return FloatingPointError(
        f"branch {branch}: the policy's log-probabilities are not finite. The weights are broken: "
        "go back to an earlier checkpoint, with a lower optimizer.learning_rate or max_grad_norm"
    )
