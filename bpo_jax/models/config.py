"""What distinguishes one decoder from another, read from and written to ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bpo_jax.models.remat import Remat as Remat
from bpo_jax.models.tree_attention import Implementation

_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "max_positions",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies (Hugging Face ``rope_type: llama3``).

    Wavelengths below ``original_max_positions / high_freq_factor`` are kept, those above
    ``original_max_positions / low_freq_factor`` are multiplied by `factor`, and those between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that distinguishes one decoder from another.

    Attributes:
      vocab_size: rows of the embedding, as many as the model has, used or not.
      head_dim: size of one attention head; queries are ``num_heads * head_dim`` wide.
      rope_scaling: None, or Llama 3.1's frequency scaling.
      tie_embeddings: the vocabulary head is the transposed embedding.
      qkv_bias: biases on the query, key and value projections (Qwen2.5 has them, Llama not).
      o_bias: a bias on the attention's output projection too (Llama's ``attention_bias``).
      qk_norm: an RMSNorm of every query and key head before it is rotated (Qwen3).
      value_head: a linear value of every hidden state beside the vocabulary head.
      dtype: of the activations. Norms, rotary angles and softmax are float32 in any case.
      param_dtype: of the stored parameters, cast to `dtype` where they are used.
      max_positions: longest path the model is made for.
      remat: what the backward pass of the packed forward recomputes: nothing, all but the matrix
        products and the results of attention, or every layer from its input.
      attention: implementation of `tree_attention` in the packed forward.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    o_bias: bool = False
    qk_norm: bool = False
    value_head: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    max_positions: int = 32_768
    remat: Remat = "none"
    attention: Implementation = "auto"

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of 1 or more")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r}: expected a finite number greater than 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}: every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs")
        if self.o_bias and not self.qkv_bias:
            raise ValueError("o_bias=True without qkv_bias: no known model is built so")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected float32 or bfloat16")
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat={self.remat!r}: expected none, dots or full")

    @classmethod
    def from_hf(cls, config: dict[str, Any], **overrides: Any) -> DecoderConfig:
        """Reads the contents of a Hugging Face ``config.json``.

        Args:
          config: the parsed file; ``model_type`` must be ``qwen2``, ``qwen3`` or ``llama``.
          **overrides: fields of the result to set, e.g. ``dtype``.

        Raises:
          ValueError: no such file's contents: no object, a field missing or of another type; or a
            model type or an option that this decoder does not compute.
        """
        if not isinstance(config, dict):
            raise ValueError(f"expected a JSON object, not {type(config).__name__}")
        try:
            return cls(**(cls._fields(config) | overrides))
        except KeyError as error:
            raise ValueError(f"field {error} is missing") from error
        except (AttributeError, TypeError, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"a field has another type than expected: {error}") from error

    @staticmethod
    def _fields(config: dict[str, Any]) -> dict[str, Any]:
        kind = config.get("model_type")
        if kind not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ValueError(f"model_type={kind!r}: this decoder computes {known}")
        _refuse_unsupported(config)
        # Newer files nest all rotary settings under one key.
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or rope
        heads = config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        return {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            # Qwen3's does not follow from the other sizes where a file leaves it out.
            "head_dim": config.get("head_dim")
            or (128 if kind == "qwen3" else config["hidden_size"] // heads),
            "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            "rope_scaling": _rope_scaling_from_hf(scaling),
            "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            "qkv_bias": kind == "qwen2" or bias,
            "o_bias": kind != "qwen2" and bias,
            "qk_norm": kind == "qwen3",
            "max_positions": int(config.get("max_position_embeddings", 32_768)),
        }

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` with which transformers builds the same model.

        Raises:
          ValueError: biases and norms together that none of its models has.
        """
        if self.qkv_bias and not self.o_bias:
            if self.qk_norm:
                raise ValueError("qk_norm=True with qkv_bias=True: needs o_bias=True as well")
            kind = "qwen2"
        else:
            kind = "qwen3" if self.qk_norm else "llama"
        rope: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            rope = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_positions,
            }
        return {
            "architectures": [_ARCHITECTURES[kind]],
            "model_type": kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            **({} if kind == "qwen2" else {"attention_bias": self.o_bias}),
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "torch_dtype": self.param_dtype,
        }


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true: this decoder has full attention only")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layer_types={config['layer_types']}: expected full_attention alone")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: convert a quantised model to floats first")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={config['hidden_act']!r}: this decoder computes silu")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias=true: this decoder's feed-forward layers have no bias")


def _rope_scaling_from_hf(scaling: dict[str, Any]) -> RopeScaling | None:
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: this decoder rotates whole heads")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling type {kind!r}: expected default or llama3")
    return RopeScaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_positions=int(scaling["original_max_position_embeddings"]),
    )
