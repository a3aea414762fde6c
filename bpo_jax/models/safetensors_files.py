"""Reading and writing folders of safetensors files, a tensor at a time.

Both ways the memory that is taken does not grow with the model: a file is opened for one tensor and
closed again, so that the pages it maps are not counted, and written tensor by tensor.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors

from bpo_jax.models.hf_names import Entry

_T = TypeVar("_T")

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file cannot be read, holds something else, or has a key twice; the message
        names it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, not {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice")
    return content


class Reader:
    """The tensors of a folder by name: shapes at once, contents when they are asked for."""

    def __init__(self, folder: pathlib.Path, single: str = SINGLE):
        """Reads the headers of all files.

        Args:
          folder: with `single`, or several files and an index.
          single: name of the one file.

        Raises:
          FileNotFoundError: no such folder, or no weights in it.
          ValueError: only pickled weights, or a file or an index that is damaged.
        """
        self.folder = folder
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        index: dict[str, str] | None = None
        if single == SINGLE and (folder / INDEX).is_file():
            index = self._index(folder / INDEX)
            files = sorted(set(index.values()))
        elif (folder / single).is_file():
            files = [single]
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
        self.where: dict[str, str] = {}
        self.headers: dict[str, tuple[tuple[int, ...], str]] = {}
        for name in files:
            self._add(name)
        for tensor, name in (index or {}).items():
            if self.where.get(tensor) != name:
                raise ValueError(
                    f"{folder / INDEX}: {tensor} should be in {name}, but is in "
                    f"{self.where.get(tensor, 'no file')}; fetch the model again"
                )

    @staticmethod
    def _index(path: pathlib.Path) -> dict[str, str]:
        where = read_json(path).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(n, str) for n in where.values()):
            raise ValueError(f"{path}: no weight_map of tensors to files")
        outside = sorted({name for name in where.values() if pathlib.Path(name).name != name})
        if outside:
            raise ValueError(f"{path}: names files outside the folder: {outside}")
        return where

    def _add(self, file: str) -> None:
        with self._open(file) as opened:
            for key in opened.keys():  # noqa: SIM118
                if key in self.where:
                    raise ValueError(
                        f"{self.folder}: tensor {key} is both in {self.where[key]} and in {file}; "
                        "remove the file that does not belong to the model"
                    )
                header = opened.get_slice(key)
                self.where[key] = file
                self.headers[key] = (tuple(header.get_shape()), header.get_dtype())

    def _open(self, file: str) -> Any:
        path = self.folder / file
        try:
            return safetensors.safe_open(str(path), framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{path}: damaged or no safetensors file ({error}); fetch it again"
            ) from error

    def check(self, entry: Entry) -> None:
        """Looks at a tensor's header.

        Raises:
          ValueError: it is missing, of another shape, or not of floats.
        """
        name, shape = entry.name, entry.file_shape
        if name not in self.where:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        found, dtype = self.headers[name]
        if found != shape:
            raise ValueError(
                f"{self.folder}: tensor {name} has shape {found}, the configuration asks for "
                f"{shape}"
            )
        if dtype not in FLOATS:
            raise ValueError(
                f"{self.folder / self.where[name]}: tensor {name} holds {dtype}; expected "
                f"{', '.join(FLOATS)}, so convert a quantised model first"
            )

    def refuse_rest(self, used: set[str], *, harmless: set[str]) -> None:
        """Refuses tensors that are not used; old writers stored the rotary frequencies as well.

        Raises:
          ValueError: names the first of them.
        """
        rest = [
            name
            for name in self.where.keys() - used - harmless
            if not name.endswith("rotary_emb.inv_freq")
        ]
        if rest:
            raise ValueError(
                f"{self.folder}: {len(rest)} tensors that the configuration has no place for: "
                f"{', '.join(sorted(rest)[:5])}"
            )

    def read(self, name: str, fill: Callable[[Any], _T]) -> _T:
        """What `fill` makes of the tensor, which is sliced as an array is while the file is open.

        Raises:
          ValueError: it cannot be read.
        """
        path = self.folder / self.where[name]
        with self._open(self.where[name]) as opened:
            tensor = opened.get_slice(name) if self.headers[name][0] else opened.get_tensor(name)
            try:
                return fill(tensor)
            except (TypeError, safetensors.SafetensorError) as error:
                raise ValueError(f"{path}: tensor {name} cannot be read ({error})") from error


def write(
    folder: pathlib.Path,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    values: Iterator[np.ndarray],
    *,
    dtype: str,
    most: int,
) -> None:
    """Writes tensors into one file, or into several with an index.

    Args:
      folder: an existing one.
      tensors: names and shapes, in the order of `values`.
      values: asked for one at a time.
      dtype: of all of them, "float32" or "bfloat16".
      most: bytes of a file; one tensor alone may be larger.
    """
    item = jnp.dtype(dtype).itemsize
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensors:
        if files[-1] and size + item * math.prod(shape) > most:
            files.append([])
            size = 0
        files[-1].append((name, shape))
        size += item * math.prod(shape)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SINGLE]
    else:
        total = item * sum(math.prod(shape) for _, shape in tensors)
        where = {name: file for file, part in zip(names, files, strict=True) for name, _ in part}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file, part in zip(names, files, strict=True):
        write_file(folder / file, part, values, dtype=dtype)


def write_file(
    path: pathlib.Path,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    values: Iterator[np.ndarray],
    *,
    dtype: str,
) -> None:
    """Writes one file as `write` does: the header's length and JSON, then the contents in turn.

    The library's own writer wants all tensors of a file at once.
    """
    into = jnp.dtype(dtype)
    code = next(code for code, name in FLOATS.items() if name == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        end = at + into.itemsize * math.prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensors:
            value = next(values)
            assert value.shape == shape
            file.write(np.ascontiguousarray(value.astype(into)).view(np.uint8).data)
