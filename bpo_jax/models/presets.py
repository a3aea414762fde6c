"""Known shapes: the small policy of the quickstart, Qwen2.5, Qwen3 and Llama 3.

The figures of the released models are those of their public ``config.json``. Instruct and base
models share them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bpo_jax.models.config import DecoderConfig, RopeScaling

_TINY = DecoderConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=True,
    max_positions=2048,
)


def _qwen(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int,
    tied: bool,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_embeddings=tied,
        qkv_bias=True,
        max_positions=32_768,
    )


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_embeddings=tied,
        qkv_bias=False,
        qk_norm=True,
        max_positions=40_960,
    )


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    *,
    head_dim: int,
    tied: bool,
    factor: float,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
        rms_norm_eps=1e-5,
        tie_embeddings=tied,
        qkv_bias=False,
        max_positions=131_072,
    )


PRESETS: dict[str, DecoderConfig] = {
    "tiny": _TINY,
    "qwen2.5-0.5b": _qwen(896, 4864, 24, 14, 2, vocab=151_936, tied=True),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, vocab=151_936, tied=True),
    "qwen2.5-3b": _qwen(2048, 11_008, 36, 16, 2, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen(3584, 18_944, 28, 28, 4, vocab=152_064, tied=False),
    "qwen2.5-14b": _qwen(5120, 13_824, 48, 40, 8, vocab=152_064, tied=False),
    "qwen2.5-32b": _qwen(5120, 27_648, 64, 40, 8, vocab=152_064, tied=False),
    "qwen2.5-72b": _qwen(8192, 29_568, 80, 64, 8, vocab=152_064, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied=False),
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32, head_dim=128, tied=False, factor=8.0),
    "llama-3.1-70b": _llama(8192, 28_672, 80, 64, head_dim=128, tied=False, factor=8.0),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, tied=True, factor=32.0),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, head_dim=128, tied=True, factor=32.0),
}
"""Shapes by name."""


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """The configuration called `name`, with fields replaced by `overrides`.

    Raises:
      ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}; known: {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **overrides)
