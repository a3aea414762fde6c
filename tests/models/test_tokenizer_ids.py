"""A tokenizer gives the same ids after it was saved, whatever the model beside it is called."""

import json

import pytest

from bpo_jax.models import policy, tokenizer, weights

TEXTS = ["go to drawer 1", "You open the drawer 12. It is empty.", "take mug 3 from desk 1"] * 3


@pytest.fixture(scope="module")
def words():
    return tokenizer.train(TEXTS, vocab_size=320)


def ids(words, text):
    return words.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_saved_tokenizer_gives_the_ids_it_was_trained_with(words, tmp_path, model_type):
    words.save_pretrained(tmp_path)
    # A class chosen by the kind of model would split numbers from words in its own way.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = tokenizer.load(tmp_path)
    for text in (*TEXTS, "drawer 12 and drawer 345,\n\nmug  7!", "never seen: ßø 你好 🙂"):
        assert ids(loaded, text) == ids(words, text)
        assert loaded.decode(ids(loaded, text)) == text
    assert loaded.chat_template == words.chat_template
    assert loaded.eos_token == tokenizer.STOP


def test_a_number_belongs_to_the_space_before_it(words):
    assert "Ġ1" in words.convert_ids_to_tokens(ids(words, "drawer 1"))


def test_the_shipped_policy_and_its_tokenizer_belong_together():
    folder = policy.folder("package:quickstart")
    config, params = weights.load(folder)
    loaded = tokenizer.load(folder)
    assert len(loaded) <= config.vocab_size == params["embedding"].shape[0]
    text = "You arrive at drawer 12. The drawer 12 is closed."
    assert loaded.decode(ids(loaded, text)) == text
    assert "Ġ1" in loaded.convert_ids_to_tokens(ids(loaded, "drawer 1"))
