"""The engine samples what the model says, whatever else is in the batch."""

import functools
import time

import jax
import numpy as np
import pytest

from bpo_jax.rollout.engine import Shapes, default_shapes
from bpo_jax.rollout.pages import PAGE, pages_of
from bpo_jax.rollout.rounds import read_all, say_all
from tests.rollout import toys

# Cached decoding against a full forward pass, float32 (tolerance of tiny models).
ATOL = 1e-4


@pytest.fixture
def engine():
    shared = toys.shared_engine()
    shared.temperature = 1.0
    opened = {line.branch for line in shared._branches}
    yield shared
    for line in list(shared._branches):
        if line.branch not in opened:
            shared.free(line.branch)
    shared._branches.check()


def _prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 24, n).tolist()


def _assert_scored(context, turn, temperature=1.0):
    logprobs, entropies = toys.forward_scores(context, turn.token_ids.tolist(), temperature)
    np.testing.assert_allclose(turn.logprobs, logprobs, atol=ATOL)
    np.testing.assert_allclose(turn.entropies, entropies, atol=ATOL)


def test_log_probabilities_and_entropies_are_those_of_a_full_forward_pass(engine):
    engine.temperature = 0.8
    # Lengths on both sides of a page, of a chunk and of the first length of a past.
    contexts = [_prompt(i, n) for i, n in enumerate((1, 8, 16, 30, 47))]
    branches = [engine.open(c, seed=i) for i, c in enumerate(contexts)]
    for _ in range(3):
        entropies = read_all(engine, branches)
        turns = say_all(engine, branches, [6, 5, 4, 3, 6])
        for i, (branch, turn) in enumerate(zip(branches, turns, strict=True)):
            _assert_scored(contexts[i], turn, 0.8)
            assert entropies[i] == pytest.approx(turn.first_entropy, abs=1e-5)
            assert turn.raw_logprobs is None
            more = _prompt(100 + i, 3 + i)
            engine.extend(branch, more)
            contexts[i] += [*turn.token_ids.tolist(), *more]
            assert engine.length(branch) == len(contexts[i])


def test_a_turn_ends_with_a_stop_token_or_at_its_limit():
    engine = toys.make_engine(stop_ids=[toys.STOP, 7])
    branches = [engine.open(_prompt(i, 5), seed=i) for i in range(8)]
    finishes = set()
    for _ in range(4):
        limits = [1, 2, 3, 4, 5, 6, 9, 9]
        for turn, limit in zip(say_all(engine, branches, limits), limits, strict=True):
            ids = turn.token_ids.tolist()
            assert not {toys.STOP, 7} & set(ids[:-1])
            assert turn.finish == ("stop" if ids[-1] in (toys.STOP, 7) else "length")
            assert len(ids) == limit or turn.finish == "stop"
            finishes.add((turn.finish, ids[-1] == 7))
    assert len(finishes) == 3


def test_the_tokens_of_a_branch_do_not_depend_on_the_batch(engine):
    prompt = _prompt(1, 10)

    def sampled(others):
        branch = engine.open(prompt, seed=9)
        rest = [engine.open(_prompt(50 + i, 3 + 4 * i), seed=50 + i) for i in range(others)]
        turns = []
        for _ in range(2):
            batch = [branch, *rest]
            turn = say_all(engine, batch, [6] * len(batch))[0]
            engine.extend(branch, [4, 5])
            turns.append((turn.token_ids.tolist(), turn.logprobs.tolist()))
        for b in [branch, *rest]:
            engine.free(b)
        return turns

    # Within one shape equal to the last bit; another one may round otherwise.
    assert sampled(2) == sampled(3)
    alone = sampled(0)
    assert len(alone[0][0]) > 1
    for others in (1, 3, 5, 7):
        for (ids, logprobs), turn in zip(alone, sampled(others), strict=True):
            assert turn[0] == ids
            np.testing.assert_allclose(turn[1], logprobs, atol=1e-5)


def test_branches_join_and_leave_while_others_speak(engine):
    contexts = {engine.open(c, seed=i): c for i, c in enumerate([_prompt(1, 4), _prompt(2, 20)])}
    turns = {}
    for branch in contexts:
        engine.say(branch, 20)
    for step in range(40):
        if step == 2:
            late = engine.open(_prompt(3, 9), seed=7)
            contexts[late] = _prompt(3, 9)
            engine.say(late, 3)
        turns |= {answer.branch: answer.turn for answer in engine.step()}
    assert set(turns) == set(contexts)
    for branch, turn in turns.items():
        _assert_scored(contexts[branch], turn)


def test_other_seeds_and_later_positions_give_other_tokens(engine):
    branches = [engine.open(_prompt(1, 4), seed=s) for s in (1, 2, 1 << 40)]
    first = [t.token_ids.tolist() for t in say_all(engine, branches, [6] * 3)]
    assert len({tuple(t) for t in first}) == 3


@pytest.mark.parametrize("share", [False, True])
def test_forks_share_the_past_and_continue_on_their_own(share):
    # Long enough for two tiles of a trunk; a fork below a fork has a longer one.
    engine = toys.make_engine(
        share=share,
        context=128 * 4,
        shapes=Shapes(rows=(8,), past=(32,), prefill=((2, 64),), steps=4, window=8),
        config=toys.LONG,
    )
    contexts = {}

    def fork(branch, seeds):
        read_all(engine, [branch])
        for child in engine.fork(branch, seeds):
            contexts[child] = list(contexts[branch])

    parent = engine.open(prompt := _prompt(4, 270), seed=1)
    contexts[parent] = list(prompt)
    lone = engine.open(other := _prompt(5, 30), seed=2)
    contexts[lone] = list(other)
    fork(parent, [11, 12, 13])
    for _ in range(3):
        turns = say_all(engine, list(contexts), [6] * len(contexts))
        assert len({tuple(t.token_ids.tolist()) for t in turns}) > 1
        for branch, turn in zip(list(contexts), turns, strict=True):
            _assert_scored(contexts[branch], turn)
            contexts[branch] += [*turn.token_ids.tolist(), 5, 6]
            engine.extend(branch, [5, 6])
        if len(contexts) == 5:
            engine.extend(parent, more := _prompt(6, 120))
            contexts[parent] += more
            fork(parent, [21, 22])
    engine._branches.check()


def test_a_fork_continues_as_a_branch_opened_with_the_same_tokens_and_seed(engine):
    parent = engine.open(_prompt(5, 9), seed=1)
    read_all(engine, [parent])
    [child] = engine.fork(parent, [77])
    opened = engine.open(_prompt(5, 9), seed=77)
    a, b = say_all(engine, [child, opened], [6, 6])
    assert a.token_ids.tolist() == b.token_ids.tolist()


def test_a_fork_copies_one_page_at_most_and_takes_no_time():
    engine = toys.make_engine(
        context=2048,
        tokens=4 * 2048,
        shapes=Shapes(rows=(8,), past=(128,), prefill=((1, 256),), steps=4, window=8),
        config=toys.LONG,
    )
    branch = engine.open(_prompt(1, 2001), seed=1)
    read_all(engine, [branch])
    pages = engine.stats()["pages"]
    seconds = []
    for depth in range(5):
        began = time.perf_counter()
        [branch] = engine.fork(branch, [depth])
        seconds.append(time.perf_counter() - began)
    assert engine.stats()["pages"] == pages == pages_of(2001)
    # The best of a few, since other programs run as well.
    assert min(seconds) < 1e-3
    say_all(engine, [line.branch for line in engine._branches], [3] * 6)
    # All but the last to write had to copy the page that all shared.
    assert engine.stats()["copied_pages"] == 5
    assert engine.stats()["pages"] == pages + 5


@pytest.mark.parametrize("tokens", [128, 200])
def test_without_room_the_newest_branches_wait_and_are_computed_again(tokens):
    engine = toys.make_engine(tokens=tokens)
    contexts = [_prompt(i, 20 + 3 * i) for i in range(8)]
    branches = [engine.open(c, seed=i) for i, c in enumerate(contexts)]
    for _ in range(3):
        turns = say_all(engine, branches, [7] * 8)
        engine._branches.check()
        for i, (branch, turn) in enumerate(zip(branches, turns, strict=True)):
            _assert_scored(contexts[i], turn)
            engine.extend(branch, [9, 8])
            contexts[i] += [*turn.token_ids.tolist(), 9, 8]
    assert engine.stats()["recomputed"] > 0
    roomy = toys.shared_engine()
    again = [roomy.open(contexts[i][: 20 + 3 * i], seed=i) for i in range(8)]
    for i, turn in enumerate(say_all(roomy, again, [7] * 8)):
        n = len(turn.token_ids)
        assert contexts[i][20 + 3 * i :][:n] == turn.token_ids.tolist()
        roomy.free(again[i])


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_give_the_tokens_of_an_uncached_run(seed):
    rng = np.random.default_rng(seed)
    engine = toys.shared_engine() if seed == 0 else _tight_engine()
    contexts: dict[int, list[int]] = {}
    seeds: dict[int, int] = {}
    asked: dict[int, int] = {}
    turns = 0
    while turns < 40:
        idle = [b for b in contexts if b not in asked]
        kind = rng.choice(["open", "fork", "say", "say", "free", "step", "step"])
        if kind == "open" and engine.free_slots:
            ids = rng.integers(2, 24, rng.integers(1, 40)).tolist()
            branch = engine.open(ids, seed=(number := int(rng.integers(2**60))))
            contexts[branch], seeds[branch] = ids, number
        elif kind == "fork" and idle and engine.free_slots:
            parent = int(rng.choice(idle))
            if engine._branches[parent].entropy is None:
                continue
            [child] = engine.fork(parent, [number := int(rng.integers(2**60))])
            contexts[child], seeds[child] = list(contexts[parent]), number
        elif kind == "say" and idle:
            branch = int(rng.choice(idle))
            room = 96 - len(contexts[branch])
            if not room:
                engine.free(branch)
                del contexts[branch]
            elif rng.random() < 0.3:
                engine.read(branch)
                asked[branch] = 0
            else:
                engine.say(branch, limit := min(room, int(rng.integers(1, 12))))
                asked[branch] = limit
        elif kind == "free" and contexts and rng.random() < 0.3:
            branch = int(rng.choice(list(contexts)))  # in the middle of a turn, too
            engine.free(branch)
            del contexts[branch]
            asked.pop(branch, None)
        for answer in engine.step():
            branch = answer.branch
            if asked.pop(branch):
                turns += 1
                expected = toys.uncached_turn(
                    contexts[branch], seeds[branch], len(answer.turn.token_ids)
                )
                assert answer.turn.token_ids.tolist() == expected
                _assert_scored(contexts[branch], answer.turn)
                contexts[branch] += expected
        engine._branches.check()
    for branch in contexts:
        engine.free(branch)
    engine._branches.check()
    assert engine.stats()["pages"] == 0


@functools.cache
def _tight_engine():
    """Too few pages for what `test_random_histories` opens, and shared trunks."""
    return toys.make_engine(tokens=144, share=True)


def test_new_weights_are_used_for_what_was_computed_with_the_old():
    engine = toys.make_engine()
    context = _prompt(7, 21)
    branch = engine.open(context, seed=3)
    read_all(engine, [branch])
    _, params = toys.policy()
    engine.set_weights(jax.tree.map(lambda p: p * 0.5, params), 1)
    with pytest.raises(ValueError, match="read before"):
        engine.fork(branch, [1])
    engine._branches.check()
    flat = read_all(engine, [branch])
    engine.set_weights(params, 2)
    [turn] = say_all(engine, [branch], [6])
    _assert_scored(context, turn)
    assert abs(float(flat[0]) - turn.first_entropy) > 1e-3
    assert engine.version == 2


def test_a_marker_ends_a_turn_at_the_token_that_completes_it(engine):
    context = _prompt(3, 12)
    for seed in range(6):
        whole = engine.open(context, seed=seed)
        [turn] = say_all(engine, [whole], [14])
        text = toys.text(turn.token_ids)
        marker = text[1:3]
        if turn.finish != "length":
            continue
        branch = engine.open(context, seed=seed)
        [part] = say_all(engine, [branch], [14], [marker, "never"])
        n = len(part.token_ids)
        assert (part.finish, n) == ("marker", text.index(marker) + len(marker))
        assert part.token_ids.tolist() == turn.token_ids.tolist()[:n]
        # What had been sampled beyond it is forgotten; saying on gives the same again.
        [rest] = say_all(engine, [branch], [14 - n])
        assert rest.token_ids.tolist() == turn.token_ids.tolist()[n:]
        np.testing.assert_allclose(rest.logprobs, turn.logprobs[n:], atol=1e-5)
        for b in (whole, branch):
            engine.free(b)
        return
    pytest.fail("no turn was long enough")


def test_truncation_samples_from_what_it_keeps_and_reports_both_log_probabilities():
    engine = toys.make_engine(top_k=3)
    engine.warmup()
    compiled = engine.compiles
    context = _prompt(2, 10)
    branches = [engine.open(context, seed=s) for s in range(8)]
    first = toys.forward_distribution(context)
    kept = np.sort(np.argsort(first)[-3:])
    turns = say_all(engine, branches, [1] * 8)
    assert {int(t.token_ids[0]) for t in turns} <= set(kept.tolist())
    for turn in turns:
        token = int(turn.token_ids[0])
        expected = first[token] - np.log(np.exp(first[kept]).sum())
        assert turn.logprobs[0] == pytest.approx(expected, abs=1e-5)
        assert turn.raw_logprobs[0] == pytest.approx(first[token], abs=1e-5)
    engine.top_k, engine.top_p = 0, 1e-6
    more = say_all(engine, branches, [1] * 8)
    assert engine.compiles == compiled
    assert all(t.logprobs[0] == pytest.approx(0, abs=1e-6) for t in more)


def test_temperature_zero_is_greedy_and_needs_no_compilation(engine):
    branch = engine.open(_prompt(6, 7), seed=1)
    say_all(engine, [branch], [6])
    compiled = engine.compiles
    engine.temperature = 0.0
    branches = [engine.open(_prompt(6, 7), seed=s) for s in (1, 2)]
    a, b = say_all(engine, branches, [6, 6])
    assert engine.compiles == compiled
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.logprobs.tolist() == [0.0] * len(a.token_ids) == a.entropies.tolist()


def test_nothing_compiles_after_warmup():
    shapes = Shapes(rows=(2, 8), past=(2, 4), prefill=((1, 16), (4, 8)), steps=2, window=4)
    engine = toys.make_engine(context=60, shapes=shapes)
    assert engine.warmup() > 0
    compiled = engine.compiles
    for n in (1, 2, 5, 8, 3):
        branches = [engine.open(_prompt(i, 2 + 3 * i), seed=i) for i in range(n)]
        for _ in range(3):
            say_all(engine, branches, [4] * n)
            read_all(engine, branches)
        while branches:
            engine.free(branches.pop())
            if branches and engine.length(branches[0]) + 4 <= 60:
                say_all(engine, branches[:1], [4])
    assert engine.compiles == compiled


@pytest.mark.parametrize(("slots", "context"), [(1, 5), (8, 96), (64, 768), (256, 32768)])
def test_default_shapes_hold_every_branch_in_few_sizes(slots, context):
    shapes = default_shapes(slots, context)
    assert shapes.rows[-1] == slots and shapes.past[-1] * PAGE >= context
    assert len(shapes.rows) <= 3 and len(shapes.past) <= 12


def test_weights_that_are_not_finite_stop_the_run():
    engine = toys.make_engine()
    _, params = toys.policy()
    engine.set_weights(jax.tree.map(lambda p: p * np.nan, params), 1)
    engine.read(engine.open([2, 3, 4], seed=1))
    with pytest.raises(FloatingPointError, match="checkpoint"):
        engine.step()


def test_what_cannot_be_done_is_refused_by_name(engine):
    branches = [engine.open([2, 3], seed=i) for i in range(8)]
    with pytest.raises(RuntimeError, match="8 slots"):
        engine.open([2], seed=0)
    engine.free(branches.pop())
    with pytest.raises(ValueError, match="read before"):
        engine.fork(branches[0], [1])
    with pytest.raises(ValueError, match="limit=95"):
        engine.say(branches[0], 95)
    with pytest.raises(ValueError, match="context of 96"):
        engine.extend(branches[0], [2] * 95)
    engine.say(branches[0], 2)
    with pytest.raises(ValueError, match="already"):
        engine.extend(branches[0], [2])
    with pytest.raises(KeyError, match="not open"):
        engine.read(10**9)
