"""Tokenizers from folders: the shipped one works, damaged ones are refused by name."""

from __future__ import annotations

import json
import shutil

import pytest

from bpo_jax import packaged
from bpo_jax.models import tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        shutil.copy(packaged.folder("package:quickstart") / name, tmp_path)
    return tmp_path


def with_template(template):
    def damage(folder):
        for extra in folder.glob("chat_template*"):
            extra.unlink()
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))

    return damage


DAMAGES = {
    "no files": (lambda folder: [(folder / name).unlink() for name in FILES], "missing or damaged"),
    "cut words": (lambda folder: (folder / FILES[0]).write_text('{"model": '), "tokenizer.json"),
    "other words": (lambda folder: (folder / FILES[0]).write_text("{}"), "tokenizer.json"),
    "cut settings": (lambda folder: (folder / FILES[1]).write_text("{"), "tokenizer_config.json"),
    "a list of settings": (lambda folder: (folder / FILES[1]).write_text("[]"), FILES[1]),
    "no template": (with_template(None), "no chat template"),
    "a template cut short": (with_template("{% for message in messages %}"), "cannot be used"),
    "a template that raises": (with_template("{{ messages[9].content.x }}"), "cannot be used"),
}


def test_the_shipped_tokenizer_is_loaded(folder):
    assert tokenizer.load(folder).eos_token == tokenizer.STOP


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_tokenizer_is_refused_by_name(case, folder):
    damage, message = DAMAGES[case]
    damage(folder)
    with pytest.raises(ValueError, match=str(folder)) as raised:
        tokenizer.load(folder)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config.json": {"model_type": "qwen2"}}, ()),
        ({"config.json": {"eos_token_id": 7}}, (7,)),
        (
            {
                "generation_config.json": {"eos_token_id": [9, 7]},
                "config.json": {"eos_token_id": 7},
            },
            (9, 7),
        ),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, (7,)),
    ],
)
def test_the_ends_of_a_model_are_those_of_its_configuration(files, ids, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer.stop_ids(tmp_path) == ids


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "<|end|>"}', '{"eos_token_id": [-1]}']
)
def test_a_damaged_configuration_of_ends_is_refused_by_name(content, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"generation_config\.json: .*; fetch it again"):
        tokenizer.stop_ids(tmp_path)
