"""The engine samples what the model says, whatever else is in the batch."""

import numpy as np
import pytest

from tests.rollout import toys

# Cached decoding against a full forward pass, float32 (tolerance of tiny models).
ATOL = 1e-4


@pytest.fixture
def engine():
    shared = toys.shared_engine()
    shared.temperature = 1.0
    opened = set(shared._lines)
    yield shared
    for branch in set(shared._lines) - opened:
        shared.free(branch)


def _prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 24, n).tolist()


def _assert_scored(context, turn, temperature=1.0):
    logprobs, entropies = toys.forward_scores(context, turn.token_ids.tolist(), temperature)
    np.testing.assert_allclose(turn.logprobs, logprobs, atol=ATOL)
    np.testing.assert_allclose(turn.entropies, entropies, atol=ATOL)


def test_log_probabilities_and_entropies_are_those_of_a_full_forward_pass(engine):
    engine.temperature = 0.8
    # Lengths on both sides of the chunk and of the first cache length.
    contexts = [_prompt(i, n) for i, n in enumerate((1, 8, 9, 30, 47))]
    branches = [engine.open(c, seed=i) for i, c in enumerate(contexts)]
    for _ in range(3):
        entropies = engine.prefill(branches)
        turns = engine.sample(branches, [6, 5, 4, 3, 6])
        for i, (branch, turn) in enumerate(zip(branches, turns, strict=True)):
            _assert_scored(contexts[i], turn, 0.8)
            assert entropies[i] == pytest.approx(turn.first_entropy, abs=1e-5)
            more = _prompt(100 + i, 3 + i)
            engine.extend(branch, more)
            contexts[i] += [*turn.token_ids.tolist(), *more]
            assert engine.length(branch) == len(contexts[i])


def test_a_turn_ends_with_the_stop_token_or_at_its_limit(engine):
    branches = [engine.open(_prompt(i, 5), seed=i) for i in range(8)]
    finishes = set()
    for _ in range(4):
        limits = [1, 2, 3, 4, 5, 6, 6, 6]
        for turn, limit in zip(engine.sample(branches, limits), limits, strict=True):
            ids = turn.token_ids.tolist()
            assert toys.STOP not in ids[:-1]
            assert turn.finish == ("stop" if ids[-1] == toys.STOP else "length")
            assert len(ids) == limit or turn.finish == "stop"
            finishes.add(turn.finish)
    assert finishes == {"stop", "length"}


def test_the_tokens_of_a_branch_do_not_depend_on_the_batch(engine):
    prompt = _prompt(1, 10)

    def sampled(others):
        rest = [engine.open(_prompt(50 + i, 3 + 4 * i), seed=50 + i) for i in range(others)]
        branch = engine.open(prompt, seed=9)
        turns = []
        for _ in range(2):
            # Another order, too: the branch comes first.
            batch = [branch, *rest]
            turn = engine.sample(batch, [6] * len(batch))[0]
            engine.extend(branch, [4, 5])
            turns.append((turn.token_ids.tolist(), turn.logprobs.tolist()))
        for b in [branch, *rest]:
            engine.free(b)
        return turns

    # Within one batch size equal to the last bit; another size may round otherwise.
    assert sampled(1) == sampled(3)
    alone = sampled(0)
    assert len(alone[0][0]) > 1
    for others in (3, 5, 7):
        for (ids, logprobs), turn in zip(alone, sampled(others), strict=True):
            assert turn[0] == ids
            np.testing.assert_allclose(turn[1], logprobs, atol=1e-5)


def test_a_branch_that_sits_out_is_sampled_later_as_if_it_had_not_waited(engine):
    prompt = _prompt(2, 11)
    branch, other = engine.open(prompt, seed=3), engine.open(_prompt(3, 6), seed=4)
    engine.prefill([branch, other])
    engine.sample([other], [6])
    waited = engine.sample([branch], [6])[0]
    _assert_scored(prompt, waited)
    again = engine.open(prompt, seed=3)
    assert engine.sample([again], [6])[0].token_ids.tolist() == waited.token_ids.tolist()


def test_other_seeds_and_later_positions_give_other_tokens(engine):
    branches = [engine.open(_prompt(1, 4), seed=s) for s in (1, 2, 1 << 40)]
    first = [t.token_ids.tolist() for t in engine.sample(branches, [6] * 3)]
    assert len({tuple(t) for t in first}) == 3


def test_forks_share_the_past_and_continue_on_their_own(engine):
    context = _prompt(4, 20)
    parent = engine.open(context, seed=1)
    engine.prefill([parent])
    children = engine.fork(parent, [11, 12, 13, 14])
    branches = [parent, *children]
    contexts = [list(context) for _ in branches]
    for _ in range(2):
        turns = engine.sample(branches, [6] * 5)
        assert len({tuple(t.token_ids.tolist()) for t in turns}) > 1
        for i, (branch, turn) in enumerate(zip(branches, turns, strict=True)):
            _assert_scored(contexts[i], turn)
            engine.extend(branch, [5 + i, 6])
            contexts[i] += [*turn.token_ids.tolist(), 5 + i, 6]
        engine.prefill(branches)
    assert engine.length(children[0]) == len(contexts[1])


def test_a_fork_continues_as_a_branch_opened_with_the_same_tokens_and_seed(engine):
    parent = engine.open(_prompt(5, 9), seed=1)
    engine.prefill([parent])
    [child] = engine.fork(parent, [77])
    opened = engine.open(_prompt(5, 9), seed=77)
    a, b = engine.sample([child, opened], [6, 6])
    assert a.token_ids.tolist() == b.token_ids.tolist()


def test_temperature_zero_is_greedy_and_needs_no_compilation(engine):
    branch = engine.open(_prompt(6, 7), seed=1)
    engine.sample([branch], [6])
    compiled = engine.compiles
    engine.temperature = 0.0
    branches = [engine.open(_prompt(6, 7), seed=s) for s in (1, 2)]
    a, b = engine.sample(branches, [6, 6])
    assert engine.compiles == compiled
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.logprobs.tolist() == [0.0] * len(a.token_ids) == a.entropies.tolist()


def test_nothing_compiles_after_warmup():
    engine = toys.make_engine(max_turn_tokens=4, context=40, length_step=24, row_sizes=(2, 8))
    assert engine.warmup() > 0
    compiled = engine.compiles
    for n in (1, 2, 5, 8, 3):
        branches = [engine.open(_prompt(i, 2 + i), seed=i) for i in range(n)]
        for _ in range(3):
            engine.sample(branches, [4] * n)
            engine.prefill(branches)
        while branches:
            engine.free(branches.pop())
            if branches and engine.length(branches[0]) + 4 <= 40:
                engine.sample(branches[:1], [4])
    assert engine.compiles == compiled


def test_rows_shrink_and_grow_without_disturbing_a_branch(engine):
    prompt = _prompt(8, 6)
    branch, context = engine.open(prompt, seed=5), list(prompt)
    rest = [engine.open(_prompt(i, 4), seed=i) for i in range(7)]
    for n in (7, 0, 5):
        for b in rest[n:]:
            engine.free(b)
        rest = rest[:n]
        rest += [engine.open(_prompt(i, 4), seed=i) for i in range(n - len(rest))]
        turn = engine.sample([*rest, branch], [6] * (len(rest) + 1))[-1]
        _assert_scored(context, turn)
        engine.extend(branch, [9] * 12)
        context += [*turn.token_ids.tolist(), *[9] * 12]


def test_what_cannot_be_done_is_refused_by_name(engine):
    branches = [engine.open([2, 3], seed=i) for i in range(8)]
    with pytest.raises(RuntimeError, match="8 slots"):
        engine.open([2], seed=0)
    with pytest.raises(ValueError, match="prefill"):
        engine.free(branches.pop())
        engine.fork(branches[0], [1])
    with pytest.raises(ValueError, match="limit=7"):
        engine.sample(branches[:1], [7])
    with pytest.raises(ValueError, match="context of 96"):
        engine.extend(branches[0], [2] * 95)
    with pytest.raises(RuntimeError, match="7 branches are open"):
        engine.set_weights({}, 1)
