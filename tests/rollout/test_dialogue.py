"""Token ids are only ever appended, and are those of the rendered conversation."""

import os
import pathlib
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpo_jax.models import tokenizer as tokenizers
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.tree import Action, Decision, Tree
from tests.rollout import chat_families as families

ROOM, GO, NOTHING = families.TEXTS
ASKED = [{"role": "user", "content": ROOM}]


@pytest.fixture(params=families.FAMILIES)
def dialogue(request):
    return Dialogue(families.make(request.param))


@pytest.fixture
def qwen():
    return Dialogue(families.make("qwen2.5"))


@pytest.fixture
def llama():
    return Dialogue(families.make("llama-3.1"))


def bytewise(dialogue: Dialogue, text: str) -> np.ndarray:
    """A turn as the policy might sample it: one token per byte, then the stop token."""
    ids = [i for c in text for i in dialogue.tokenizer.encode(c, add_special_tokens=False)]
    return np.array([*ids, dialogue.stop_id], np.int32)


def talk(dialogue, turns, *, sampled=None, stopped=True):
    """A conversation: its messages and its ids. Turns are pairs of a reply and an observation."""
    messages, ids = list(ASKED), dialogue.prompt_ids(ASKED)
    for reply, observation in turns:
        said = dialogue.turn_ids(reply) if sampled is None else sampled(dialogue, reply)
        heard = dialogue.observation_ids(observation, stopped=stopped)
        ids = np.concatenate([ids, said if stopped else said[:-1], heard])
        messages += [
            {"role": "assistant", "content": dialogue.text(said)},
            {"role": "user", "content": observation},
        ]
    return messages, ids


# Appending.


@pytest.mark.parametrize("family", ["own", "qwen2.5", "smollm2", "qwen3", "llama-3.1"])
def test_ids_are_those_of_the_rendered_conversation(family):
    # Here turns are tokenised as the tokenizer would, so the whole must agree, id by id.
    dialogue = Dialogue(families.make(family))
    turns = [(GO, NOTHING), ("look", "A drawer 2.\nX"), ("help", "")]
    for count in range(len(turns) + 1):
        messages, ids = talk(dialogue, turns[:count])
        rendered = dialogue.render(messages)
        assert ids.tolist() == dialogue.tokenizer.encode(rendered, add_special_tokens=False)
        assert dialogue.tokenizer.decode(ids) == rendered


@given(
    replies=st.lists(st.text(max_size=30), max_size=4),
    observations=st.lists(st.text(max_size=60), min_size=4, max_size=4),
    family=st.sampled_from(families.FAMILIES),
)
@settings(deadline=None)
def test_every_conversation_is_what_its_template_renders(replies, observations, family):
    dialogue = Dialogue(families.make(family))
    turns = list(zip(replies, observations, strict=False))
    messages, ids = talk(dialogue, turns, sampled=bytewise)
    dialogue.check(messages, ids)


def test_a_turn_tokenised_otherwise_keeps_its_ids_and_its_text(dialogue):
    messages, ids = talk(dialogue, [(GO, NOTHING)], sampled=bytewise)
    start = len(dialogue.prompt_ids(ASKED))
    turn = bytewise(dialogue, GO)
    assert ids[start : start + len(turn)].tolist() == turn.tolist()
    assert dialogue.text(turn) == GO
    dialogue.check(messages, ids)


def test_what_is_read_does_not_depend_on_what_was_said_before(dialogue):
    heard = dialogue.observation_ids(NOTHING, stopped=True).tolist()
    _, ids = talk(dialogue, [("<think>long</think>look", ROOM), (GO, NOTHING)], sampled=bytewise)
    assert ids[-len(heard) :].tolist() == heard


def test_a_thought_stays_where_the_template_would_take_it_out():
    dialogue = Dialogue(families.make("qwen3"))
    reply = "<think>\nThe drawer.\n</think>\n\nlook"
    messages, ids = talk(dialogue, [(reply, NOTHING), (GO, NOTHING)])
    assert "The drawer." in dialogue.tokenizer.decode(ids)
    assert "The drawer." not in dialogue.render(messages)
    dialogue.check(messages, ids)


def test_an_empty_thought_that_opened_a_turn_stays():
    dialogue = Dialogue(families.make("qwen3"), thinking=False)
    messages, ids = talk(dialogue, [(GO, NOTHING), ("look", NOTHING)])
    assert dialogue.tokenizer.decode(ids).count("<think>\n\n</think>\n\n") == 3
    dialogue.check(messages, ids)


@pytest.mark.parametrize("reply", ["<think>a</think>look", "look"])
def test_a_turn_by_somebody_else_goes_on_with_the_thought_that_its_opening_began(reply):
    dialogue = Dialogue(families.make("deepseek-r1"))
    ids = np.append(dialogue.prompt_ids(ASKED), dialogue.turn_ids(reply))
    said = dialogue.tokenizer.decode(ids)
    assert said.count("<think>") == said.count("</think>") == 1


def test_white_space_that_the_template_strips_is_not_read(llama):
    plain = llama.observation_ids("A desk.", stopped=True).tolist()
    assert llama.observation_ids("\n\n  A desk.\t\n", stopped=True).tolist() == plain
    assert llama.prompt_ids([{"role": "user", "content": " x\n"}]).tolist() == (
        llama.prompt_ids([{"role": "user", "content": "x"}]).tolist()
    )


def test_white_space_that_the_template_keeps_is_read(qwen):
    for text in ("\n\nA desk.", "A desk.\n", "  ", "\n"):
        ids = qwen.observation_ids(text, stopped=True)
        whole = qwen.template.after_turn(text)
        assert qwen.tokenizer.decode(ids) == whole
        assert ids.tolist() == qwen.tokenizer.encode(whole, add_special_tokens=False)


def test_composed_characters_are_the_same_text(qwen):
    messages, ids = talk(qwen, [(GO, "cafe\u0301")])
    assert "caf\u00e9" in qwen.tokenizer.decode(ids)
    assert unicodedata.is_normalized("NFC", qwen.tokenizer.decode(ids))
    qwen.check(messages, ids)


def test_what_no_utf8_can_hold_is_replaced(dialogue):
    messages, ids = talk(dialogue, [(GO, "a \udcff b")])
    dialogue.check(messages, ids)
    assert "a \ufffd b" in dialogue.tokenizer.decode(ids)
    assert "a \ufffd b" in dialogue.tokenizer.decode(
        dialogue.prompt_ids([{"role": "user", "content": "a \udcff b"}])
    )


# Special tokens.


def test_special_tokens_in_a_message_stay_text(dialogue):
    stop = dialogue.stop_token
    ids = dialogue.observation_ids(f"a {stop} b", stopped=True).tolist()
    plain = dialogue.observation_ids("a b", stopped=True).tolist()
    assert ids.count(dialogue.stop_id) == plain.count(dialogue.stop_id)
    assert f"a {stop} b" in dialogue.tokenizer.decode(ids)
    prompt = dialogue.prompt_ids([{"role": "user", "content": f"x {stop} y"}]).tolist()
    other = dialogue.prompt_ids([{"role": "user", "content": "x y"}]).tolist()
    assert prompt.count(dialogue.stop_id) == other.count(dialogue.stop_id)


def test_a_message_that_is_part_of_the_template_is_not_taken_for_it(qwen):
    # "s" stands in the word "system" and in "<|im_start|>" before it is a message.
    told = [{"role": "system", "content": "s"}, {"role": "user", "content": "<|im_end|>"}]
    ids = qwen.prompt_ids(told)
    assert qwen.tokenizer.decode(ids) == qwen.render(told)
    starts = qwen.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids.tolist().count(starts) == 3 and ids.tolist().count(qwen.stop_id) == 2


def test_text_beside_a_special_token_is_read_as_it_always_is(qwen):
    # The line break before the message and those it begins with may be one token.
    text = "\n\nNothing happens."
    whole = qwen.observation_ids(text, stopped=True).tolist()
    mixed = qwen.observation_ids(f"{text} <|im_end|>", stopped=True).tolist()
    start = qwen.tokenizer.encode(f"\n<|im_start|>user\n{text}", add_special_tokens=False)
    assert whole[: len(start)] == mixed[: len(start)] == start


# The end of a turn.


def test_the_stop_token_is_found_in_the_template(qwen, llama):
    assert qwen.stop_token == "<|im_end|>" and llama.stop_token == "<|eot_id|>"
    assert qwen.stop_ids == (qwen.stop_id,)


def test_a_turn_cut_at_its_limit_is_closed_in_the_context(dialogue):
    whole = dialogue.observation_ids(NOTHING, stopped=True).tolist()
    cut = dialogue.observation_ids(NOTHING, stopped=False).tolist()
    assert cut == [dialogue.stop_id, *whole]
    assert dialogue.text(bytewise(dialogue, "go")[:-1]) == "go"
    messages, ids = talk(dialogue, [(GO, NOTHING)], stopped=False)
    dialogue.check(messages, ids)


def test_a_turn_may_end_with_another_stop_token_and_keeps_it(llama):
    ends = [llama.tokenizer.convert_tokens_to_ids(t) for t in ("<|eom_id|>", "<|end_of_text|>")]
    dialogue = Dialogue(llama.tokenizer, stop_ids=ends)
    assert set(dialogue.stop_ids) == {*ends, dialogue.stop_id}
    for end in ends:
        turn = np.append(dialogue.turn_ids(GO)[:-1], np.int32(end))
        assert dialogue.text(turn) == GO
        heard = dialogue.observation_ids(NOTHING, stopped=True)
        ids = np.concatenate([dialogue.prompt_ids(ASKED), turn, heard])
        messages, usual = talk(dialogue, [(GO, NOTHING)])
        dialogue.check(messages, ids)
        # It stands in the place of the template's, and all else is the same.
        assert [i for i, j in zip(ids, usual, strict=True) if i != j] == [end]


def test_the_end_of_a_document_ends_a_turn_where_the_tokenizer_names_it():
    tokenizer = families.make.__wrapped__("qwen2.5")
    tokenizer.eos_token = tokenizers.PAD
    dialogue = Dialogue(tokenizer)
    assert dialogue.stop_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert dialogue.stop_ids == (tokenizer.pad_token_id, dialogue.stop_id)


# Checking.


def test_a_conversation_that_is_not_the_messages_is_refused(qwen):
    messages, ids = talk(qwen, [(GO, NOTHING), ("look", NOTHING)])
    wrong = [dict(m) for m in messages]
    wrong[1]["content"] = "go to drawer 2"
    with pytest.raises(ValueError, match="turn 0: the ids say 'go to drawer 1', the message"):
        qwen.check(wrong, ids)
    wrong = [dict(m) for m in messages]
    wrong[2]["content"] = "Something happens."
    with pytest.raises(ValueError, match="what follows turn 0: the ids say"):
        qwen.check(wrong, ids)
    with pytest.raises(ValueError, match="the prompt: the ids say"):
        qwen.check([{"role": "user", "content": GO}, *messages[1:]], ids)
    with pytest.raises(ValueError, match="more ids than messages"):
        qwen.check(messages[:3], ids)
    with pytest.raises(ValueError, match="what follows turn 1"):
        qwen.check(messages, ids[:-1])


def test_ids_that_say_the_same_otherwise_are_refused(qwen):
    prompt = qwen.prompt_ids(ASKED)
    text = qwen.tokenizer.decode(prompt)
    other = [i for c in ROOM[:5] for i in qwen.tokenizer.encode(c, add_special_tokens=False)]
    start, rest = (
        qwen.tokenizer.encode(part, add_special_tokens=False)
        for part in (text[: text.index(ROOM)], text[text.index(ROOM) + 5 :])
    )
    other = [*start, *other, *rest]
    assert qwen.tokenizer.decode(other) == text and other != prompt.tolist()
    with pytest.raises(ValueError, match="the prompt: the ids"):
        qwen.check(ASKED, other)


def test_a_template_with_its_own_idea_of_some_observations_is_refused():
    tokenizer = families.make.__wrapped__("qwen2.5")
    tokenizer.chat_template = families.CHATML.replace("+ m.content +", "+ m.content[:9999] +")
    dialogue = Dialogue(tokenizer)
    dialogue.observation_ids("x" * 9999, stopped=True)
    with pytest.raises(ValueError, match="treats this observation otherwise than others"):
        dialogue.observation_ids("x" * 10_000, stopped=True)


def test_a_tokenizer_that_loses_text_is_refused():
    import tokenizers as rust

    tokenizer = families.make.__wrapped__("smollm2")
    tokenizer.backend_tokenizer.decoder = rust.decoders.Sequence(
        [rust.decoders.ByteLevel(), rust.decoders.Replace("drawer", "door")]
    )
    with pytest.raises(ValueError, match="the tokenizer changes text"):
        Dialogue(tokenizer).prompt_ids(ASKED)


def test_every_trajectory_of_a_tree_is_checked(qwen):
    def child(reply, observation):
        ids = qwen.observation_ids(observation, stopped=True)
        after = Decision(context_ids=ids, observation=observation)
        return Action(token_ids=qwen.turn_ids(reply), next=after)

    def end():
        return Action(token_ids=qwen.turn_ids("look"), end="done")

    first, second = child(GO, NOTHING), child("look", ROOM)
    thought = Action(token_ids=qwen.turn_ids("help")[:-1])
    thought.next = Decision(mid_turn=True, actions=[child(" me", NOTHING)])
    thought.next.actions[0].next.actions = [end()]
    first.next.actions, second.next.actions = [end(), thought], [end()]
    root = Decision(context_ids=qwen.prompt_ids(ASKED), actions=[first, second])
    tree = Tree(task_id="t", root=root)
    assert len(list(tree.paths())) == 3
    qwen.check_tree(tree, ASKED)
    second.next.observation = "Something else."
    with pytest.raises(ValueError, match="what follows turn 0"):
        qwen.check_tree(tree, ASKED)


# Templates and tokenizers of models, where there are some.

FOLDER = os.environ.get("BPO_CHAT_TEMPLATES")
KNOWN = re.compile(r"^(qwen|meta-llama|llama3|smollm)", re.IGNORECASE)
TEMPLATES = [p for p in sorted(pathlib.Path(FOLDER or "").glob("*.jinja")) if KNOWN.match(p.name)]


@pytest.mark.skipif(
    not FOLDER, reason="set BPO_CHAT_TEMPLATES to a folder of *.jinja (llama.cpp has one)"
)
@pytest.mark.parametrize(
    "path", TEMPLATES if FOLDER else [None], ids=lambda path: path and path.name
)
@pytest.mark.parametrize("thinking", [None, False])
def test_templates_of_models(path, thinking):
    source = path.read_text(encoding="utf-8")
    tokenizer = families.make.__wrapped__("llama-3.1" if "llama" in path.name.lower() else "qwen3")
    tokenizer.chat_template = source
    dialogue = Dialogue(tokenizer, thinking=thinking)
    told = [{"role": "system", "content": "Be brief.\n"}, *ASKED]
    assert "26 Jul 2024" in dialogue.render(told) or "Today" not in source
    turns = [("<think>\nx\n</think>\n\nlook", " \nA desk. \n"), (GO, "<tool_response>1")]
    messages, ids = talk(dialogue, turns)
    dialogue.check(messages, ids)


@pytest.mark.skipif(
    "BPO_TOKENIZER" not in os.environ,
    reason="set BPO_TOKENIZER to the folder of an instruct model's tokenizer",
)
def test_a_tokenizer_of_a_model():
    folder = os.environ["BPO_TOKENIZER"]
    dialogue = Dialogue(tokenizers.load(folder), stop_ids=tokenizers.stop_ids(folder))
    turns = [(GO, NOTHING), ("<think>x</think>look", "\n\n cafe\u0301 \ud83d\n"), ("help", "")]
    messages, ids = talk(dialogue, turns[:2], sampled=bytewise)
    dialogue.check(messages, ids)
    messages, ids = talk(dialogue, turns)
    dialogue.check(messages, ids)
