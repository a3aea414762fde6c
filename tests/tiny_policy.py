"""A policy small enough to train in a test: a folder with a config and a trained tokenizer."""

import json
import pathlib

from bpo_jax.environments import alfworld
from bpo_jax.models import decoder, tokenizer


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes ``config.json`` and the tokenizer's files; parameters are drawn by the run."""
    environment = alfworld.make()
    tasks = environment.tasks("train", seed=123)
    texts = []
    for _ in range(4):
        task = next(tasks)
        texts.append(environment.start(task).reset().observation)
    words = tokenizer.train(texts, vocab_size=512)
    words.save_pretrained(folder)
    config = decoder.DecoderConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8, max_positions=512,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder
