"""Weights in the Hugging Face format: a folder with ``config.json`` and safetensors files.

Qwen2 and Llama name and lay out their tensors alike. A projection is stored there as
[outputs, inputs], one tensor a layer; here as [layers, inputs, heads, head_dim] and the like.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from bpo_jax.models.config import DecoderConfig
from bpo_jax.models.decoder import Params

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """How one tensor of the format relates to one parameter (of one layer, if in ``layers``)."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


def _entry(name: str, ours: tuple[int, ...], inputs: int) -> _Entry:
    """`inputs` leading axes of our parameter are summed over; 0 for vectors and the embedding."""
    if not inputs:
        flat = (int(np.prod(ours)),) if name.endswith(("bias", "norm.weight")) else ours
        return _Entry(
            name=name,
            shape=flat,
            read=lambda x: x.reshape(ours),
            write=lambda x: x.reshape(flat),
        )
    rows, columns = int(np.prod(ours[:inputs])), int(np.prod(ours[inputs:]))
    return _Entry(
        name=name,
        shape=(columns, rows),
        read=lambda x: x.T.reshape(ours),
        write=lambda x: x.reshape(rows, columns).T,
    )


def _outer_entries(c: DecoderConfig) -> dict[str, _Entry]:
    entries = {
        "embedding": _entry("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), 0),
        "final_norm": _entry("model.norm.weight", (c.hidden_size,), 0),
    }
    if not c.tie_embeddings:
        entries["head"] = _entry("lm_head.weight", (c.hidden_size, c.vocab_size), 1)
    return entries


def _layer_entries(c: DecoderConfig, layer: int) -> dict[str, _Entry]:
    d, f, h, k, n = (
        c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim
    )  # fmt: skip
    table: dict[str, tuple[str, tuple[int, ...], int]] = {
        "attention_norm": ("input_layernorm.weight", (d,), 0),
        "q": ("self_attn.q_proj.weight", (d, h, n), 1),
        "k": ("self_attn.k_proj.weight", (d, k, n), 1),
        "v": ("self_attn.v_proj.weight", (d, k, n), 1),
        "o": ("self_attn.o_proj.weight", (h, n, d), 2),
        "mlp_norm": ("post_attention_layernorm.weight", (d,), 0),
        "gate": ("mlp.gate_proj.weight", (d, f), 1),
        "up": ("mlp.up_proj.weight", (d, f), 1),
        "down": ("mlp.down_proj.weight", (f, d), 1),
    }
    if c.qkv_bias:
        table |= {
            "q_bias": ("self_attn.q_proj.bias", (h, n), 0),
            "k_bias": ("self_attn.k_proj.bias", (k, n), 0),
            "v_bias": ("self_attn.v_proj.bias", (k, n), 0),
        }
    return {
        ours: _entry(f"model.layers.{layer}.{name}", shape, inputs)
        for ours, (name, shape, inputs) in table.items()
    }


def load(
    path: str | pathlib.Path, config: DecoderConfig | None = None, dtype: str | None = None
) -> tuple[DecoderConfig, Params]:
    """Loads a model from a local folder.

    Args:
      path: a folder with ``config.json`` and ``model.safetensors``, or several files and an index.
      config: what the folder must hold; read from ``config.json`` where None.
      dtype: of the parameters, "float32" or "bfloat16"; the configuration's where None.

    Returns:
      The configuration, its ``param_dtype`` set to `dtype`, and parameters as NumPy arrays.

    Raises:
      FileNotFoundError: no such folder or no weights in it.
      ValueError: only pickled weights, or tensors missing, left over or of another shape.
    """
    folder = pathlib.Path(path)
    if config is None:
        config = read_config(folder)
    config = dataclasses.replace(config, param_dtype=dtype or config.param_dtype)
    reader = _Reader(folder)
    into = jnp.dtype(config.param_dtype)
    params: Params = {
        ours: reader.take(entry, into) for ours, entry in _outer_entries(config).items()
    }
    layers: dict[str, np.ndarray] = {}
    for layer in range(config.num_layers):
        for ours, entry in _layer_entries(config, layer).items():
            value = reader.take(entry, into)
            if ours not in layers:
                layers[ours] = np.empty((config.num_layers, *value.shape), into)
            layers[ours][layer] = value
    params["layers"] = layers
    reader.refuse_rest(tied=config.tie_embeddings)
    return config, params


def read_config(path: str | pathlib.Path) -> DecoderConfig:
    """The configuration of a local model folder; parameters in the dtype it was saved in.

    Raises:
      FileNotFoundError: no ``config.json`` in the folder.
    """
    file = pathlib.Path(path) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no {CONFIG}; expected the folder of a saved model")
    raw = json.loads(file.read_text())
    saved = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    param_dtype = saved if saved in ("float32", "bfloat16") else "float32"
    return DecoderConfig.from_hf(raw, param_dtype=param_dtype)


def save(
    path: str | pathlib.Path, config: DecoderConfig, params: Params, dtype: str | None = None
) -> None:
    """Writes a folder that `load` and transformers' ``from_pretrained`` read.

    Args:
      path: the folder, made where it is missing.
      config: of the model.
      params: its parameters.
      dtype: of the written tensors; the configuration's ``param_dtype`` where None.
    """
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(config, param_dtype=dtype or config.param_dtype)
    into = jnp.dtype(config.param_dtype)
    tensors = {
        entry.name: entry.write(np.asarray(params[ours]))
        for ours, entry in _outer_entries(config).items()
    }
    layers = {name: np.asarray(value) for name, value in params["layers"].items()}
    for layer in range(config.num_layers):
        for ours, entry in _layer_entries(config, layer).items():
            tensors[entry.name] = entry.write(layers[ours][layer])
    written = {name: np.ascontiguousarray(value.astype(into)) for name, value in tensors.items()}
    safetensors.numpy.save_file(written, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n")


class _Reader:
    """The tensors of a folder by name, each read when it is taken."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        if (folder / INDEX).is_file():
            where = json.loads((folder / INDEX).read_text())["weight_map"]
            files = sorted(set(where.values()))
        elif (folder / SINGLE).is_file():
            files = [SINGLE]
        else:
            pickled = [p.name for pattern in _PICKLED for p in folder.glob(pattern)]
            if pickled:
                raise ValueError(
                    f"{folder} holds only pickled weights ({', '.join(sorted(pickled))}), which "
                    "run code when they are opened; convert the model to safetensors"
                )
            raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX}")
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder}: {INDEX} names {missing}, which are not there")
        self.files = {n: safetensors.safe_open(str(folder / n), framework="numpy") for n in files}
        self.where = {key: name for name, file in self.files.items() for key in file.keys()}  # noqa: SIM118

    def take(self, entry: _Entry, dtype: np.dtype) -> np.ndarray:
        if entry.name not in self.where:
            raise ValueError(f"{self.folder}: tensor {entry.name} is missing")
        value = self.files[self.where.pop(entry.name)].get_tensor(entry.name)
        if value.shape != entry.shape:
            raise ValueError(
                f"{self.folder}: tensor {entry.name} has shape {value.shape}, the configuration "
                f"asks for {entry.shape}"
            )
        return entry.read(value).astype(dtype)

    def refuse_rest(self, *, tied: bool) -> None:
        """Some writers store a tied head a second time, and old ones the rotary frequencies."""
        harmless = {"lm_head.weight"} if tied else set()
        rest = [
            name
            for name in self.where
            if name not in harmless and not name.endswith("rotary_emb.inv_freq")
        ]
        if rest:
            raise ValueError(
                f"{self.folder}: {len(rest)} tensors that the configuration has no place for: "
                f"{', '.join(sorted(rest)[:5])}"
            )
