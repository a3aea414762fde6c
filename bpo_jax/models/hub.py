"""Where a policy's files are: in a local folder, in the package, or on the Hugging Face hub."""

from __future__ import annotations

import pathlib

from bpo_jax import packaged

_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""What is fetched: weights, configuration, tokenizer. Nothing that could run code."""
_WORDS = ("*.json", "*.jinja", "merges.txt")


class HubError(OSError):
    """A model cannot be fetched."""

    one_line = True  # the message says everything; a traceback would only hide it


def local(name: str, *, weights: bool = True) -> pathlib.Path:
    """The folder of `name`, fetched from the hub where it is a hub id.

    What was fetched before is taken from the hub's cache (``HF_HOME``), and looked for there alone
    where ``HF_HUB_OFFLINE=1``.

    Args:
      name: "package:<name>", a folder, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".
      weights: False for the configuration and the tokenizer alone.

    Raises:
      HubError: a hub id that is neither in the cache nor to be had.
    """
    if not packaged.is_hub_id(name):
        return packaged.folder(name)
    # The progress bars of this library belong to a user at a terminal, and so does its import.
    import huggingface_hub

    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=list(_FILES if weights else _WORDS),
                ignore_patterns=["*/*"],  # copies in other formats lie in folders
            )
        )
    # It raises those of three libraries, for what is one thing to the user.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise HubError(
            f"{name}: no such folder, and it cannot be fetched from the model hub "
            f"({type(error).__name__}: {reason}); check the name and the network, or give the "
            "path of a folder with config.json and *.safetensors"
        ) from error
