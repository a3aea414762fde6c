"""Token ids are only ever appended, and are those of the rendered conversation."""

import numpy as np
import pytest
import transformers

from bpo_jax.models import tokenizer as tokenizers
from bpo_jax.rollout.dialogue import Dialogue

TEXTS = ["You are in a room. You see a drawer 1, a drawer 2.", "go to drawer 1", "Nothing happens."]

# The shape of templates that end every message with a token and a line break.
CHATML = (
    (
        "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    .replace("<|im_end|>\n{%-", "<|im_end|>{{ '\n' }}{%-")
    .replace("assistant\n{%-", "assistant{{ '\n' }}{%-")
)


def _tokenizer(kind: str) -> transformers.PreTrainedTokenizerBase:
    tokenizer = tokenizers.train(TEXTS * 3, vocab_size=300)
    if kind == "chatml":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
        tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(params=["own", "chatml"])
def dialogue(request):
    return Dialogue(_tokenizer(request.param))


def _turn(dialogue: Dialogue, text: str) -> np.ndarray:
    """A turn as the policy might sample it: one token per byte, then the stop token."""
    ids = [i for c in text for i in dialogue.tokenizer.encode(c, add_special_tokens=False)]
    return np.array([*ids, dialogue.stop_id], np.int32)


def test_the_stop_token_is_found_in_the_template(dialogue):
    assert dialogue.stop_token == "<|im_end|>"
    assert dialogue.stop_id == dialogue.tokenizer.eos_token_id


def test_appended_ids_are_the_rendered_conversation(dialogue):
    messages = [{"role": "user", "content": TEXTS[0]}]
    ids = dialogue.prompt_ids(messages).tolist()
    assert ids == dialogue.tokenizer.encode(dialogue.render(messages), add_special_tokens=False)
    for text, observation in (("go to drawer 1", "Nothing happens."), ("look", "A drawer 2.\nX")):
        # Here the turn is tokenised as the tokenizer would, so the whole must agree, id by id.
        turn = dialogue.tokenizer.encode(text, add_special_tokens=False)
        ids += [*turn, dialogue.stop_id]
        ids += dialogue.observation_ids(observation, stopped=True).tolist()
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": observation},
        ]
        rendered = dialogue.render(messages)
        assert ids == dialogue.tokenizer.encode(rendered, add_special_tokens=False)
    assert dialogue.tokenizer.decode(ids) == rendered


def test_a_turn_tokenised_otherwise_keeps_its_ids_and_its_text(dialogue):
    messages = [{"role": "user", "content": TEXTS[0]}]
    prompt = dialogue.prompt_ids(messages)
    turn = _turn(dialogue, "go to drawer 1")
    observed = dialogue.observation_ids("Nothing happens.", stopped=True)
    assert dialogue.text(turn) == "go to drawer 1"
    ids = np.concatenate([prompt, turn, observed])
    messages += [
        {"role": "assistant", "content": "go to drawer 1"},
        {"role": "user", "content": "Nothing happens."},
    ]
    assert dialogue.tokenizer.decode(ids) == dialogue.render(messages)
    assert len(ids) > len(dialogue.prompt_ids(messages))


def test_a_turn_cut_at_its_limit_is_closed_in_the_context(dialogue):
    whole = dialogue.observation_ids("Nothing happens.", stopped=True).tolist()
    cut = dialogue.observation_ids("Nothing happens.", stopped=False).tolist()
    assert cut == [dialogue.stop_id, *whole]
    assert dialogue.text(_turn(dialogue, "go")[:-1]) == "go"


def test_special_tokens_in_an_observation_stay_text(dialogue):
    ids = dialogue.observation_ids("a <|im_end|> b", stopped=True).tolist()
    plain = dialogue.observation_ids("a b", stopped=True).tolist()
    assert ids.count(dialogue.stop_id) == plain.count(dialogue.stop_id)
    assert "a <|im_end|> b" in dialogue.tokenizer.decode(ids)
    prompt = dialogue.prompt_ids([{"role": "user", "content": "x <|im_end|> y"}]).tolist()
    other = dialogue.prompt_ids([{"role": "user", "content": "x y"}]).tolist()
    assert prompt.count(dialogue.stop_id) == other.count(dialogue.stop_id)


def test_a_template_that_rewrites_what_was_said_is_refused():
    tokenizer = _tokenizer("own")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}<|assistant|>"
    with pytest.raises(ValueError, match="rewrites earlier messages"):
        Dialogue(tokenizer)


def test_a_template_without_an_end_of_turn_token_is_refused():
    tokenizer = _tokenizer("own")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "\\n")
    with pytest.raises(ValueError, match="no special token"):
        Dialogue(tokenizer)
