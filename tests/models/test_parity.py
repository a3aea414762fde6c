"""Models of every supported shape against transformers on PyTorch, both ways through a folder.

The models are small and random (biases and norms too), in float32; 2e-5 on logits and log-probs is
some ten times what the order of summation does to them.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bpo_jax.models import weights
from bpo_jax.models.config import DecoderConfig, RopeScaling
from tests.models.test_decoder import LLAMA, QWEN, build

torch = pytest.importorskip("torch", reason="install the extra [parity]")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5
LLAMA_3_2 = RopeScaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
)
QWEN3 = dataclasses.replace(QWEN, qkv_bias=False, qk_norm=True, head_dim=16)
MODELS: dict[str, DecoderConfig] = {
    "qwen2 tied": QWEN,
    "qwen2 untied, one key head": dataclasses.replace(QWEN, tie_embeddings=False, num_kv_heads=1),
    "qwen2 long": dataclasses.replace(QWEN, rope_theta=1e6, rms_norm_eps=1e-5),
    "llama 3.1": LLAMA,
    "llama 3.2 tied": dataclasses.replace(LLAMA, tie_embeddings=True, rope_scaling=LLAMA_3_2),
    "llama 2, all heads": dataclasses.replace(LLAMA, rope_scaling=None, num_kv_heads=4),
    "llama, theta 1e5": dataclasses.replace(LLAMA, rope_scaling=None, rope_theta=1e5, head_dim=8),
    "llama with biases": dataclasses.replace(LLAMA, qkv_bias=True, o_bias=True),
    "qwen3 tied": QWEN3,
    "qwen3 untied": dataclasses.replace(QWEN3, tie_embeddings=False, rope_theta=1e6),
    "qwen3 with biases": dataclasses.replace(QWEN3, qkv_bias=True, o_bias=True),
}
EVERY = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
LENGTH = 100


def our_logits(config, params, tokens):
    model = nnx.merge(build(config)[0], params)
    position = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    hidden = model(jnp.asarray(tokens), position, jnp.full(tokens.shape, LENGTH))
    return np.asarray(hidden @ model.head_dv())


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def random_tokens(config):
    return np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH))


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    ours, theirs = jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs)
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@EVERY
def test_transformers_computes_the_logits_of_a_saved_model(config, tmp_path):
    params = build(config)[1]
    weights.save(tmp_path, config, params, most_bytes=20_000)
    assert (tmp_path / weights.INDEX).is_file()
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = random_tokens(config)
    assert_same(our_logits(config, params, tokens), their_logits(theirs, tokens))


@EVERY
def test_a_model_that_transformers_saved_has_its_logits_here(config, tmp_path):
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config.to_hf())
    theirs = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    read, params = weights.load(tmp_path)
    assert read == config
    tokens = random_tokens(config)
    assert_same(our_logits(config, params, tokens), their_logits(theirs, tokens))


@EVERY
def test_config_json_of_version_4_means_the_same(config, tmp_path):
    # It has the rotary settings at the top, and the dtype under another name.
    settings = transformers.AutoConfig.for_model(**config.to_hf())
    new = json.loads(settings.to_json_string(use_diff=False))
    assert DecoderConfig.from_hf(new) == config
    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    assert DecoderConfig.from_hf(old) == config


def test_transformers_passes_over_a_value_head(tmp_path):
    config = dataclasses.replace(QWEN, value_head=True)
    params = build(config)[1]
    weights.save(tmp_path, config, params)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["unexpected_keys"]
    tokens = random_tokens(config)
    assert_same(our_logits(config, params, tokens), their_logits(theirs, tokens))
