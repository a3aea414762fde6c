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
