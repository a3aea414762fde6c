"""Compares a checkpoint's logits and log-probs here with those of transformers on PyTorch.

    pip install -e ".[parity]"
    python benchmarks/parity.py --checkpoint=DIR [--tokens=512] [--dtype=float32]

DIR is a folder in Hugging Face's format or a hub id; `benchmarks/smollm2.py` makes one without a
hub. Both programs load it and score the same English text, source code and, where the tokenizer has
a template, a chat. Prints one JSON object and exits with 1 where a gate is missed:

- float32: the largest difference of a logit and of a target's log-prob, at most 5e-4 and 2e-4
  (2e-5 both for a model of less than 10M parameters, as in the tests);
- bfloat16: both programs' mean errors against transformers in float32; ours may be 1.5 times as
  large. Maxima are shown and not gated: rounding can move one logit by more than 1 in either.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import random
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from bpo_jax.models import decoder, hub, logprobs, weights

TINY = 10_000_000
GATES = {"tiny": (2e-5, 2e-5), "real": (5e-4, 2e-4)}
MOST_RATIO = 1.5
PROSE = """\
The harbour lay still in the early light, and the boats, which had come in during the night, stood \
so close together that one could have crossed from one side to the other without wetting a shoe. \
An old woman was sorting fish into three baskets. "Eleven for the inn," she said, "four for the \
school, and what is left over goes to the cats." Nobody had ever seen her count, yet nobody \
remembered that she had been wrong. In 1954, when the great storm took the lighthouse, it was she \
who kept a fire burning on the hill until the last of the crews had found the way home; and when \
the newspaper wanted to know how she had stayed awake for two nights, she answered that she had not.
"""
PLACES = ("kitchen", "garden", "library", "engine room", "market", "laboratory", "café")
THINGS = ("a brass key", "two letters", "an apple", "the blue notebook", "some string", "a lamp")
NAMES = ("Mira", "Jonas", "Adaeze", "Pavel", "Lin", "Søren", "Fatima")


def prose(sentences: int) -> str:
    """English of any length: a passage, then sentences made from words with a fixed seed."""
    rng = random.Random(0)
    made = [
        f"At {rng.randrange(24)}:{rng.randrange(60):02} {rng.choice(NAMES)} went to the "
        f"{rng.choice(PLACES)}, left {rng.choice(THINGS)} and paid {rng.randrange(500)} euros."
        for _ in range(sentences)
    ]
    return PROSE + " ".join(made)


def texts(tokenizer: Any, tokens: int) -> dict[str, list[int]]:
    """Token ids of each kind of text, about equally many, `tokens` or more in all."""
    chat = [
        {"role": "user", "content": "Where is the key? " + prose(3)},
        {"role": "assistant", "content": "In the kitchen, I think: 12 + 30 = 42."},
        {"role": "user", "content": "Thanks! Now explain this:\n" + prose(tokens // 8)},
    ]
    # A sentence has more than eight tokens and this file more than two thousand.
    code = pathlib.Path(__file__).read_text(encoding="utf-8")
    sources = {
        "english": tokenizer(prose(tokens // 8)).input_ids,
        "code": tokenizer(code * (1 + tokens // 2000)).input_ids,
    }
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        sources["chat"] = tokenizer(rendered, add_special_tokens=False).input_ids
    each = -(-tokens // len(sources)) + 1  # the first token of a text is no target
    return {kind: ids[:each] for kind, ids in sources.items()}


class Scores:
    """Logits and target log-probs of all texts, and how long they took."""

    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []
        self.seconds: dict[str, float] = {}


def ours(path: pathlib.Path, rows: list[list[int]], dtype: str) -> tuple[Scores, int]:
    """Scores of this package, and the number of parameters."""
    scores, began = Scores(), time.monotonic()
    config, params = weights.load(path, dtype=dtype)
    config = dataclasses.replace(config, dtype=dtype)
    graphdef = decoder.abstract(config)[0]
    scores.seconds["load"] = time.monotonic() - began
    length = -(-max(map(len, rows)) // 128) * 128

    @jax.jit
    def score(params: Any, tokens_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        position_bt = jnp.broadcast_to(jnp.arange(length), tokens_bt.shape)
        hidden_btd = model(tokens_bt, position_bt, jnp.full(tokens_bt.shape, length))
        head_dv = model.head_dv().astype(hidden_btd.dtype)
        target_bt = jnp.roll(tokens_bt, -1, axis=1)
        logprob_bt, _ = logprobs.token_logprobs(hidden_btd, head_dv, target_bt)
        logits_btv = jnp.einsum(
            "btd,dv->btv", hidden_btd, head_dv, preferred_element_type=jnp.float32
        )
        return logits_btv, logprob_bt

    padded = [np.array([row + [0] * (length - len(row))]) for row in rows]
    began = time.monotonic()
    compiled = score.lower(params, padded[0]).compile()
    scores.seconds["compile"] = time.monotonic() - began
    began = time.monotonic()
    for row, tokens in zip(rows, padded, strict=True):
        logits, logprob = jax.device_get(compiled(params, tokens))
        scores.logits.append(logits[0, : len(row) - 1].astype(np.float32))
        scores.logprobs.append(logprob[0, : len(row) - 1])
    scores.seconds["score"] = time.monotonic() - began
    return scores, sum(leaf.size for leaf in jax.tree.leaves(params))


def theirs(path: pathlib.Path, rows: list[list[int]], dtype: str) -> Scores:
    """Scores of transformers."""
    scores, began = Scores(), time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.eval()
    scores.seconds["load"] = time.monotonic() - began
    began = time.monotonic()
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row])).logits[0, :-1].float()
            chosen = torch.tensor(row[1:])[:, None]
            logprob = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
            scores.logits.append(logits.numpy())
            scores.logprobs.append(logprob.numpy())
    scores.seconds["score"] = time.monotonic() - began
    del model
    gc.collect()
    return scores


def difference(scores: Scores, reference: Scores) -> dict[str, float]:
    """Largest and mean difference of logits and log-probs, and how often the best token agrees."""
    pairs = list(zip(scores.logits, reference.logits, strict=True))
    logit = [np.abs(a - b) for a, b in pairs]
    same = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    logprob = np.abs(np.concatenate(scores.logprobs) - np.concatenate(reference.logprobs))
    return {
        "logit_max": float(max(d.max() for d in logit)),
        "logit_mean": float(sum(d.sum(dtype=np.float64) for d in logit) / sum(map(np.size, logit))),
        "logprob_max": float(logprob.max()),
        "logprob_mean": float(logprob.mean(dtype=np.float64)),
        "argmax_agreement": float(same.mean()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a folder or a hub id")
    parser.add_argument("--tokens", type=int, default=512, help="at least so many targets")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    path = hub.local(options.checkpoint)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    by_kind = texts(tokenizer, options.tokens)
    rows = list(by_kind.values())
    reference = theirs(path, rows, "float32")
    mine, parameters = ours(path, rows, options.dtype)
    result: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "parameters": parameters,
        "dtype": options.dtype,
        "targets": sum(len(row) - 1 for row in rows),
        "texts": {kind: len(ids) for kind, ids in by_kind.items()},
        "difference": difference(mine, reference),
        "seconds": {"ours": mine.seconds, "transformers_float32": reference.seconds},
    }
    if options.dtype == "float32":
        size = "tiny" if parameters < TINY else "real"
        most = dict(zip(("logit_max", "logprob_max"), GATES[size], strict=True))
        passed = all(result["difference"][name] <= value for name, value in most.items())
    else:
        rival = theirs(path, rows, "bfloat16")
        result["transformers_difference"] = difference(rival, reference)
        result["seconds"]["transformers_bfloat16"] = rival.seconds
        names = ("logit_mean", "logprob_mean")
        result["ratio"] = {
            name: result["difference"][name] / result["transformers_difference"][name]
            for name in names
        }
        most = dict.fromkeys(names, MOST_RATIO)
        passed = all(result["ratio"][name] <= value for name, value in most.items())
    result |= {"gates": most, "passed": passed}
    print(json.dumps(result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
