"""What a template puts around messages is found out, and the same on every day."""

import datetime

import pytest

from bpo_jax.rollout.chat_template import ChatTemplate, Frame
from tests.rollout import chat_families as families

ASKED = [{"role": "user", "content": "Where?"}]
CHATML = Frame(
    stop="<|im_end|>",
    before="\n<|im_start|>user\n",
    after="<|im_end|>\n<|im_start|>assistant\n",
    strips=False,
)
LLAMA = Frame(
    stop="<|eot_id|>",
    before="<|start_header_id|>user<|end_header_id|>\n\n",
    after="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    strips=True,
)


def with_template(template, family="qwen2.5"):
    made = families.make.__wrapped__(family)
    made.chat_template = template
    return made


@pytest.mark.parametrize("family", ["qwen2.5", "smollm2", "qwen3", "never-opens", "always-opens"])
def test_the_frame_of_chatml(family):
    assert ChatTemplate(families.make(family)).frame == CHATML


def test_the_frame_of_llama():
    assert ChatTemplate(families.make("llama-3.1")).frame == LLAMA


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_conversation_grows_at_its_end(family):
    template = ChatTemplate(families.make(family))
    grown = [*ASKED, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "So?"}]
    first, second = template.pieces(grown)
    assert template.pieces(ASKED) == [first] == [template.render(ASKED)]
    assert second == template.frame.stop + template.after_turn("So?")


def test_a_system_message_of_the_family_is_part_of_the_prompt():
    template = ChatTemplate(families.make("qwen2.5"))
    assert "You are Test" in template.render(ASKED)
    told = [{"role": "system", "content": "You are a cook."}, *ASKED]
    assert "You are Test" not in template.render(told)
    assert "You are Test" not in template.after_turn("So?")


@pytest.mark.parametrize("clock", [False, True])
def test_the_date_is_pinned(clock):
    source = families.TEMPLATES["llama-3.1"]
    tokenizer = with_template(f"{{%- set clock = {clock} -%}}{source}", "llama-3.1")
    assert "Today: 26 Jul 2024\n" in ChatTemplate(tokenizer).render(ASKED)
    other = ChatTemplate(tokenizer, date=datetime.date(2025, 1, 2))
    assert "Today: 02 Jan 2025\n" in other.render(ASKED)


def test_the_date_is_pinned_where_a_template_asks_the_clock_itself():
    asks = "{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now(\"%B\") }}"
    template = ChatTemplate(with_template(asks + families.CHATML))
    assert template.render(ASKED).startswith("2024-07-26|July")


def test_without_thinking_a_turn_opens_with_an_empty_thought_that_stays():
    template = ChatTemplate(families.make("qwen3"), thinking=False)
    opened = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.frame.after == "<|im_end|>\n" + opened
    assert template.render(ASKED).endswith(opened)
    grown = [*ASKED, {"role": "assistant", "content": "Here."}, *ASKED]
    assert [piece.count(opened) for piece in template.pieces(grown)] == [1, 1]
    assert not template.opens_thought


@pytest.mark.parametrize("family", ["deepseek-r1", "always-thinks"])
def test_a_turn_may_open_inside_a_thought(family):
    template = ChatTemplate(families.make(family))
    assert template.opens_thought
    assert template.render(ASKED).endswith("<think>\n")


def test_thoughts_that_a_template_takes_out_leave_the_rest_as_it_was():
    template = ChatTemplate(families.make("qwen3"))
    grown = [*ASKED, {"role": "assistant", "content": "<think>a</think>\n\nHere."}, *ASKED]
    assert "<think>" not in template.render(grown)
    assert template.pieces(grown)[0] == template.render(ASKED)


def test_messages_are_told_from_placeholders():
    template = ChatTemplate(families.make("qwen2.5"))
    talk = [
        {"role": "user", "content": "(message 0) (message 1)"},
        {"role": "assistant", "content": "(message 2)"},
        {"role": "user", "content": "(messagee 1)"},
    ]
    _, shown = template.split(talk)
    assert shown == [m["content"] for m in talk]
    assert len(template.pieces(talk)) == 2
    assert template.after_turn("(message 1)") == CHATML.before + "(message 1)" + CHATML.after


REFUSED = {
    "{{ messages[-1].content }}<|im_end|>": "rewrites earlier messages",
    "{% for m in messages %}{{ loop.length }}{{ m.content }}<|im_end|>{% endfor %}": "rewrites",
    "{% for m in messages %}{{ m.role + m.content }}\n{% endfor %}": "begins with no special token",
    "{% for m in messages %}{{ m.content | replace('\n', '') }}<|im_end|>{% endfor %}": "changes",
    "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}": "rewrites",
    "{% for m in messages %}{{ m.content.parts[0] }}<|im_end|>{% endfor %}": "refuses messages by",
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_to_which_nothing_can_be_appended_is_refused(template):
    with pytest.raises(ValueError, match=REFUSED[template]):
        ChatTemplate(with_template(template))
