"""Weights in the Hugging Face format: a folder with ``config.json`` and safetensors files.

Loading puts every tensor where it will live as it is read: each process reads the slices that its
own devices hold, one tensor of one layer at a time, so beside the parameters themselves a host
needs memory for one such tensor. `save` goes the same way back.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from bpo_jax.models import hf_names, safetensors_files
from bpo_jax.models.config import DecoderConfig
from bpo_jax.models.decoder import Params
from bpo_jax.models.hf_names import Entry
from bpo_jax.models.safetensors_files import INDEX as INDEX
from bpo_jax.models.safetensors_files import SINGLE as SINGLE
from bpo_jax.models.safetensors_files import Reader

CONFIG = "config.json"
VALUE_HEAD = "value_head.safetensors"
"""The value head has a file of its own, which other programs pass over."""
MOST_BYTES = 5 << 30
"""Of a written file, as most published models have it."""
_Place = tuple[Any, int | None, Entry]
"""An array of ours, the layer of it where it is stacked, and what it is called."""
_AT_ONCE = 8 << 20
"""Bytes of a tensor that are read and cast together."""


def load(
    path: str | pathlib.Path,
    config: DecoderConfig | None = None,
    dtype: str | None = None,
    shardings: Any = None,
) -> tuple[DecoderConfig, Params]:
    """Loads a model from a local folder.

    Args:
      path: a folder with ``config.json`` and ``model.safetensors``, or several files and an index.
      config: what the folder must hold; read from ``config.json`` where None. A value head that is
        not there is 0.
      dtype: of the parameters, "float32" or "bfloat16"; the configuration's where None.
      shardings: where each parameter lives, in the structure of the parameters (see
        `bpo_jax.models.partition.param_shardings`); all on the first device where None.

    Returns:
      The configuration, its ``param_dtype`` set to `dtype`, and the parameters.

    Raises:
      FileNotFoundError: no such folder or no weights in it.
      ValueError: only pickled weights; a damaged file; or tensors missing, left over, stored twice,
        of another shape, not of floats or not finite.
    """
    folder = pathlib.Path(path)
    if config is None:
        config = read_config(folder)
    config = dataclasses.replace(config, param_dtype=dtype or config.param_dtype)
    into = jnp.dtype(config.param_dtype)
    reader = Reader(folder)
    outer = hf_names.outer_entries(config)
    by_layer = [hf_names.layer_entries(config, layer) for layer in range(config.num_layers)]
    stacks = {name: [layer[name] for layer in by_layer] for name in by_layer[0]}
    # All headers first: what is wrong there is said before anything large is read.
    entries = [*outer.values(), *(entry for stack in stacks.values() for entry in stack)]
    for entry in entries:
        reader.check(entry)
    # Some writers store a tied head a second time.
    harmless = {"lm_head.weight"} if config.tie_embeddings else set()
    reader.refuse_rest({entry.name for entry in entries}, harmless=harmless)

    if shardings is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings = collections.defaultdict(lambda: here)
        shardings["layers"] = collections.defaultdict(lambda: here)
    params: Params = {
        name: _take(reader, entry, into, shardings[name]) for name, entry in outer.items()
    }
    params["layers"] = {
        name: _stack(reader, stack, into, shardings["layers"][name])
        for name, stack in stacks.items()
    }
    value_head = hf_names.value_entries(config)
    if value_head and (folder / VALUE_HEAD).is_file():
        reader = Reader(folder, single=VALUE_HEAD)
        for entry in value_head.values():
            reader.check(entry)
        for name, entry in value_head.items():
            params[name] = _take(reader, entry, into, shardings[name])
    else:
        for name, entry in value_head.items():
            params[name] = jax.device_put(np.zeros(entry.shape, into), shardings[name])
    return config, params


class _Cast:
    """A tensor in a file whose slices come in another dtype, and are looked at."""

    def __init__(self, tensor: Any, dtype: np.dtype, where: str):
        self.tensor, self.dtype, self.where = tensor, dtype, where

    def __getitem__(self, slices: Any) -> np.ndarray:
        with np.errstate(over="ignore"):
            value = self.tensor[slices].astype(self.dtype, copy=False)
        # In the dtype it is used in: a value may fit the file's and not this one.
        if not np.isfinite(value).all():
            raise ValueError(f"{self.where} has values that are not finite")
        return value


def _take(reader: Reader, entry: Entry, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """One tensor, where it is to live."""
    where = f"{reader.folder / reader.where[entry.name]}: tensor {entry.name}"
    parts: dict[Any, np.ndarray] = {}

    def fill(tensor: Any) -> jax.Array:
        def part(index: hf_names.Index | None) -> np.ndarray:
            assert index is not None
            key = tuple(s.indices(n) for s, n in zip(index, entry.shape, strict=True))
            if key not in parts:  # devices may hold the same
                shape = tuple(stop - start for start, stop, _ in key)
                parts[key] = np.empty(shape, dtype)
                entry.read_into(parts[key], index, _Cast(tensor, dtype, where), _AT_ONCE)
            return parts[key]

        return jax.make_array_from_callback(entry.shape, sharding, part, dtype=dtype)

    # To the end: until then the host's copy is kept.
    return jax.block_until_ready(reader.read(entry.name, fill))


def _stack(reader: Reader, entries: list[Entry], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """The tensor of every layer behind a leading axis of layers, filled in place."""
    of_layer = sharding
    if isinstance(sharding, NamedSharding):
        of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    empty, put = _stacking(sharding)
    stack = empty((len(entries), *entries[0].shape), dtype)
    for layer, entry in enumerate(entries):
        stack = jax.block_until_ready(put(stack, _take(reader, entry, dtype, of_layer), layer))
    return stack


@functools.cache
def _stacking(sharding: Sharding) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Makes an array of zeros, and replaces one element of its first axis in place."""
    empty = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
    put = jax.jit(
        lambda stack, part, i: jax.lax.dynamic_update_index_in_dim(stack, part, i, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )
    return empty, put


def read_config(path: str | pathlib.Path) -> DecoderConfig:
    """The configuration of a local model folder; parameters in the dtype it was saved in.

    Raises:
      FileNotFoundError: no ``config.json`` in the folder.
      ValueError: it cannot be read, or describes no model that `Decoder` computes.
    """
    file = pathlib.Path(path) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no {CONFIG}; expected the folder of a saved model")
    raw = safetensors_files.read_json(file)
    saved = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    param_dtype = saved if saved in ("float32", "bfloat16") else "float32"
    try:
        return DecoderConfig.from_hf(raw, param_dtype=param_dtype)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def save(
    path: str | pathlib.Path,
    config: DecoderConfig,
    params: Params,
    dtype: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> None:
    """Writes a folder that `load` and transformers' ``from_pretrained`` read.

    Tensors go from their devices to the file one after the other. Of several processes all must
    call this, and the first one writes.

    Args:
      path: the folder, made where it is missing.
      config: of the model.
      params: its parameters. A value head goes to ``value_head.safetensors``, which transformers
        does not read.
      dtype: of the written tensors; the configuration's ``param_dtype`` where None.
      most_bytes: of one file; a larger model is split into several, with an index.
    """
    folder = pathlib.Path(path)
    config = dataclasses.replace(config, param_dtype=dtype or config.param_dtype)
    places: list[_Place] = [
        (params[name], None, entry) for name, entry in hf_names.outer_entries(config).items()
    ]
    for layer in range(config.num_layers):
        for name, entry in hf_names.layer_entries(config, layer).items():
            places.append((params["layers"][name], layer, entry))
    value_head: list[_Place] = [
        (params[name], None, entry) for name, entry in hf_names.value_entries(config).items()
    ]
    if jax.process_index():
        collections.deque(_values(places + value_head), maxlen=0)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    shapes = [(entry.name, entry.file_shape) for _, _, entry in places]
    safetensors_files.write(
        folder, shapes, _values(places), dtype=config.param_dtype, most=most_bytes
    )
    if value_head:
        shapes = [(entry.name, entry.file_shape) for _, _, entry in value_head]
        safetensors_files.write_file(
            folder / VALUE_HEAD, shapes, _values(value_head), dtype=config.param_dtype
        )


def _values(places: list[_Place]) -> Iterator[np.ndarray]:
    """The tensors on the host, as the files hold them."""
    for value, layer, entry in places:
        part = value
        if layer is not None:
            # With the layer as an operand, so that one program takes all of them.
            take = jax.lax.dynamic_index_in_dim if isinstance(value, jax.Array) else np.take
            part = take(value, layer, 0)
        if isinstance(part, jax.Array) and not part.is_fully_addressable:
            part = multihost_utils.process_allgather(part, tiled=True)
        yield entry.to_file(np.asarray(part).reshape(entry.shape))
