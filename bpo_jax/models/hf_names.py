"""Which tensor of the Hugging Face format is which parameter, and how its axes lie.

Qwen2, Qwen3 and Llama name and lay out their tensors alike. A projection is stored there as
[outputs, inputs], one tensor a layer; here as [layers, inputs, heads, head_dim] and the like.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from bpo_jax.models.config import DecoderConfig

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """How one tensor of the format relates to one parameter (of one layer, if stacked).

    Attributes:
      name: in the file.
      shape: of our array.
      groups: for every axis of the file the axes of ours that are flattened into it.
    """

    name: str
    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The tensor's shape in the file."""
        return tuple(math.prod(self.shape[axis] for axis in group) for group in self.groups)

    @property
    def order(self) -> tuple[int, ...]:
        """Our axes in the order of the file's."""
        return tuple(axis for group in self.groups for axis in group)

    def to_file(self, ours: np.ndarray) -> np.ndarray:
        """Our array as the file holds it."""
        return ours.transpose(self.order).reshape(self.file_shape)

    def read_into(self, out: np.ndarray, index: Index, source: Any, most: int) -> None:
        """Fills `out` with ``ours[index]``, reading nothing else and at most `most` bytes at once.

        Args:
          out: of the shape of that part, in any dtype.
          index: a slice of step 1 for every axis of ours.
          source: indexed by slices of the file's axes, gives arrays.
          most: as near as whole units of the first axis allow.
        """
        if not self.shape:
            out[...] = source[()]
            return
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        by_file = out.transpose(self.order)
        first = self.order[0]
        row_bytes = max(1, by_file[:1].size * 4)
        step = max(1, most // row_bytes)
        for begin in range(0, by_file.shape[0], step):
            end = min(begin + step, by_file.shape[0])
            part = list(bounds)
            part[first] = (bounds[first][0] + begin, bounds[first][0] + end)
            by_file[begin:end] = self._take(part, source)

    def _take(self, bounds: list[tuple[int, int]], source: Any) -> np.ndarray:
        """The part of the file that holds these bounds of our axes, with our axes in its order."""
        slices, shape, inner = [], [], []
        for group in self.groups:
            # Rows of the file are contiguous in the first axis of a group; the rest is cut after.
            low, high = bounds[group[0]]
            rest = [self.shape[axis] for axis in group[1:]]
            slices.append(slice(low * math.prod(rest), high * math.prod(rest)))
            shape += [high - low, *rest]
            inner += [slice(None), *(slice(*bounds[axis]) for axis in group[1:])]
        return source[tuple(slices)].reshape(shape)[tuple(inner)]


def _vector(name: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name=name, shape=shape, groups=(tuple(range(len(shape))),))


def _matrix(name: str, shape: tuple[int, ...], inputs: int) -> Entry:
    """`inputs` leading axes of ours are summed over; the file has them last."""
    axes = tuple(range(len(shape)))
    return Entry(name=name, shape=shape, groups=(axes[inputs:], axes[:inputs]))


def outer_entries(c: DecoderConfig) -> dict[str, Entry]:
    """The parameters outside the layers, by our names."""
    embedding = Entry(
        name="model.embed_tokens.weight",
        shape=(c.vocab_size, c.hidden_size),
        groups=((0,), (1,)),
    )
    entries = {
        "embedding": embedding,
        "final_norm": _vector("model.norm.weight", (c.hidden_size,)),
    }
    if not c.tie_embeddings:
        entries["head"] = _matrix("lm_head.weight", (c.hidden_size, c.vocab_size), 1)
    return entries


def layer_entries(c: DecoderConfig, layer: int) -> dict[str, Entry]:
    """The parameters of one layer, by our names."""
    d, f, h, k, n = (
        c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim
    )  # fmt: skip
    prefix = f"model.layers.{layer}."
    matrices: dict[str, tuple[str, tuple[int, ...], int]] = {
        "q": ("self_attn.q_proj", (d, h, n), 1),
        "k": ("self_attn.k_proj", (d, k, n), 1),
        "v": ("self_attn.v_proj", (d, k, n), 1),
        "o": ("self_attn.o_proj", (h, n, d), 2),
        "gate": ("mlp.gate_proj", (d, f), 1),
        "up": ("mlp.up_proj", (d, f), 1),
        "down": ("mlp.down_proj", (f, d), 1),
    }
    vectors: dict[str, tuple[str, tuple[int, ...]]] = {
        "attention_norm": ("input_layernorm.weight", (d,)),
        "mlp_norm": ("post_attention_layernorm.weight", (d,)),
    }
    if c.qkv_bias:
        vectors |= {
            "q_bias": ("self_attn.q_proj.bias", (h, n)),
            "k_bias": ("self_attn.k_proj.bias", (k, n)),
            "v_bias": ("self_attn.v_proj.bias", (k, n)),
        }
    if c.o_bias:
        vectors["o_bias"] = ("self_attn.o_proj.bias", (d,))
    if c.qk_norm:
        vectors["q_norm"] = ("self_attn.q_norm.weight", (n,))
        vectors["k_norm"] = ("self_attn.k_norm.weight", (n,))
    return {
        ours: _matrix(f"{prefix}{name}.weight", shape, inputs)
        for ours, (name, shape, inputs) in matrices.items()
    } | {ours: _vector(prefix + name, shape) for ours, (name, shape) in vectors.items()}


def value_entries(c: DecoderConfig) -> dict[str, Entry]:
    """The value head, which the format has no place for; it lies in a file of its own."""
    if not c.value_head:
        return {}
    return {
        "value": _vector("weight", (c.hidden_size,)),
        "value_bias": Entry(name="bias", shape=(), groups=()),
    }
