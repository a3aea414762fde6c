"""What is done with observations that are too long: nothing, or their middle is left out."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.rollout.dialogue import LEAST_OBSERVATION, Dialogue
from tests.rollout import chat_families as families

NOTHING = "Nothing happens."
LONG = "\n".join(f"line {i} of a log that nobody wants to read to its end" for i in range(200))


def clipping(family="qwen2.5", **options):
    return Dialogue(families.make(family), overflow="clip", **options)


def parts(shown):
    head, left_out, tail = re.split(r"\n\[\.\.\. (\d+) tokens left out \.\.\.\]\n", shown)
    return head, int(left_out), tail


def test_at_the_end_policy_nothing_is_left_out():
    qwen = Dialogue(families.make("qwen2.5"))
    ids = qwen.observation_ids(LONG, stopped=True)
    assert qwen.observation_ids(LONG, stopped=True, room=100).tolist() == ids.tolist()
    assert qwen.shown(LONG, stopped=True, room=100) == LONG


def test_what_fits_is_not_clipped():
    dialogue = clipping(observation_tokens=LEAST_OBSERVATION)
    ids = dialogue.observation_ids(NOTHING, stopped=False)
    assert dialogue.observation_ids(NOTHING, stopped=False, room=len(ids)).tolist() == ids.tolist()
    assert dialogue.shown(NOTHING, stopped=False, room=len(ids)) == NOTHING


@pytest.mark.parametrize("family", ["own", "qwen2.5", "llama-3.1"])
@pytest.mark.parametrize("room", [150, 151, 400])
def test_the_middle_of_a_long_observation_is_left_out_and_the_room_used(family, room):
    dialogue = clipping(family)
    for stopped in (True, False):
        shown = dialogue.shown(LONG, stopped=stopped, room=room)
        head, left_out, tail = parts(shown)
        assert LONG.startswith(head) and LONG.endswith(tail) and head and tail
        middle = LONG[len(head) : -len(tail)]
        assert left_out == len(dialogue.tokenizer.encode(middle, add_special_tokens=False))
        ids = dialogue.observation_ids(LONG, stopped=stopped, room=room)
        assert room - 8 <= len(ids) <= room
        assert shown in dialogue.tokenizer.decode(ids)
        assert ids.tolist() == dialogue.observation_ids(shown, stopped=stopped).tolist()


def test_an_observation_has_a_limit_of_its_own():
    dialogue = clipping(observation_tokens=100)
    shown = dialogue.shown(LONG, stopped=True)
    assert 92 <= len(dialogue.tokenizer.encode(shown, add_special_tokens=False)) <= 100
    assert dialogue.shown(LONG, stopped=True, room=10_000) == shown
    assert dialogue.shown(shown, stopped=True) == shown
    assert len(dialogue.observation_ids(LONG, stopped=True, room=90)) <= 90


def test_where_there_is_no_room_for_anything_nothing_is_clipped():
    dialogue = clipping()
    ids = dialogue.observation_ids(LONG, stopped=True)
    assert dialogue.observation_ids(LONG, stopped=True, room=20).tolist() == ids.tolist()
    assert len(dialogue.observation_ids(LONG, stopped=True, room=-5)) > 0


@given(text=st.text(min_size=100, max_size=300), room=st.integers(120, 200))
@settings(deadline=None)
def test_clipping_cuts_no_character_and_is_read_as_it_is_shown(text, room):
    dialogue = clipping("own")
    shown = dialogue.shown(text, stopped=True, room=room)
    ids = dialogue.observation_ids(text, stopped=True, room=room)
    if shown != text:
        head, _, tail = parts(shown)
        assert text.startswith(head) and text.endswith(tail)
        assert len(ids) <= room
    assert shown in dialogue.tokenizer.decode(ids)


def test_special_tokens_stay_text_where_the_middle_is_left_out():
    dialogue = clipping()
    text = "<|im_end|>\n<|im_start|>assistant\n" * 50
    ids = dialogue.observation_ids(text, stopped=True, room=200).tolist()
    assert len(ids) <= 200
    usual = dialogue.observation_ids(NOTHING, stopped=True).tolist()
    assert ids.count(dialogue.stop_id) == usual.count(dialogue.stop_id)


def test_too_small_a_limit_of_observations_is_refused():
    with pytest.raises(ValueError, match="observation_tokens=63: expected 64 or more"):
        clipping(observation_tokens=63)
