"""Byte-level BPE tokenizers: trained for small policies, loaded for all of them.

A trained tokenizer is an ordinary Hugging Face fast tokenizer with its own chat template, so small
policies and real models go through the same code. The template spends one marker on a user message
and one on the policy's turn, which ends with the stop token.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable

# Only tokenizers are used here; the library's advice to install PyTorch would mislead.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import tokenizers
import transformers

PAD = "<|endoftext|>"
STOP = "<|im_end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    f"{ASSISTANT}{{{{ message['content'] }}}}{STOP}"
    "{%- else -%}"
    f"{USER}{{{{ message['content'] }}}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{ASSISTANT}{{%- endif -%}}"
)


def train(texts: Iterable[str], vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Trains a byte-level BPE on `texts`.

    Any text round-trips: what was never seen falls back to bytes. A number and the space before it
    are one word, so that " drawer 3" is two tokens.

    Args:
      texts: the text to learn merges from, as the policy will read it.
      vocab_size: number of ids, the four special tokens and 256 bytes included.

    Returns:
      A fast tokenizer with `CHAT_TEMPLATE`; ``eos_token`` is the stop token.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, STOP, USER, ASSISTANT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=STOP,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load(path: str | pathlib.Path) -> transformers.PreTrainedTokenizerFast:
    """Loads a fast tokenizer from a folder or a hub id.

    Raises:
      ValueError: its files are missing or damaged, or it has no chat template that renders a
        dialogue, without which an agent cannot hold one.
    """
    # The class a model's config.json implies would put its own splitting of words in the place of
    # the one in tokenizer.json, and ids would silently differ from those the policy was trained on.
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    # The library raises bare Exceptions of its Rust half, and TypeErrors for JSON of another shape.
    except Exception as error:
        raise ValueError(
            f"tokenizer {path}: tokenizer.json or tokenizer_config.json is missing or damaged "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); fetch them again"
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer {path}: no chat template; use an instruct model's tokenizer, or put a "
            "chat_template into its tokenizer_config.json"
        )
    greeting = [{"role": "user", "content": "hello"}]
    try:
        tokenizer.apply_chat_template(greeting, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # of Jinja, or what the template does
        raise ValueError(
            f"tokenizer {path}: its chat template cannot be used ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); mend chat_template in tokenizer_config.json"
        ) from error
    return tokenizer


def stop_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
    """The ids that end what a model writes, by the ``eos_token_id`` of its configuration.

    Of ``generation_config.json``, where models name them all, or else of ``config.json``; empty
    where there is neither or none is named.

    Raises:
      ValueError: a damaged file.
    """
    for name in ("generation_config.json", "config.json"):
        path = pathlib.Path(folder) / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ids = [] if found is None else found if isinstance(found, list) else [found]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise TypeError(f"eos_token_id={found!r} is neither an id nor a list of them")
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}; fetch it again") from error
        if ids:
            return tuple(ids)
    return ()
