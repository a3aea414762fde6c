"""Weights in the Hugging Face format: a folder with ``config.json`` and safetensors files.

Qwen2 and Llama name and lay out their tensors alike. A projection is stored there as
[outputs, inputs], one tensor a layer; here as [layers, inputs, heads, head_dim] and the like.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

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
      ValueError: only pickled weights; a damaged file; or tensors missing, left over, of another
        shape, not of floats or not finite.
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
      ValueError: it cannot be read, or describes no model that `Decoder` computes.
    """
    file = pathlib.Path(path) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no {CONFIG}; expected the folder of a saved model")
    raw = _json_object(file)
    saved = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    param_dtype = saved if saved in ("float32", "bfloat16") else "float32"
    try:
        return DecoderConfig.from_hf(raw, param_dtype=param_dtype)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _json_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file cannot be read or holds something else; the message names it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, not {type(content).__name__}")
    return content


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
            where = _json_object(folder / INDEX).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(n, str) for n in where.values()):
                raise ValueError(f"{folder / INDEX}: no weight_map of tensors to files")
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
        self.files = {name: self._open(folder / name) for name in files}
        self.where = {key: name for name, file in self.files.items() for key in file.keys()}  # noqa: SIM118

    @staticmethod
    def _open(file: pathlib.Path) -> Any:
        try:
            return safetensors.safe_open(str(file), framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{file}: damaged or no safetensors file ({error}); fetch it again"
            ) from error

    def take(self, entry: _Entry, dtype: np.dtype) -> np.ndarray:
        if entry.name not in self.where:
            raise ValueError(f"{self.folder}: tensor {entry.name} is missing")
        file = self.where.pop(entry.name)
        try:
            value = self.files[file].get_tensor(entry.name)
        except (TypeError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{self.folder / file}: tensor {entry.name} cannot be read ({error})"
            ) from error
        if value.shape != entry.shape:
            raise ValueError(
                f"{self.folder}: tensor {entry.name} has shape {value.shape}, the configuration "
                f"asks for {entry.shape}"
            )
        # NumPy itself does not count bfloat16 as a float.
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"{self.folder / file}: tensor {entry.name} holds {value.dtype}; expected floats, "
                "so convert a quantised model first"
            )
        # In the dtype it is used in: a value may fit the file's and not this one.
        value = entry.read(value).astype(dtype)
        if not np.isfinite(value).all():
            raise ValueError(
                f"{self.folder / file}: tensor {entry.name} has values that are not finite"
            )
        return value

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
