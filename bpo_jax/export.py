"""``--mode=export``: a checkpoint as a folder that transformers, vLLM and others load.

Beside the weights the folder gets the tokenizer with its chat template, ``generation_config.json``
(sampling as the policy was trained) and ``provenance.json``. It is written under another name and
renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
from typing import Any

import jax
from ml_collections import config_dict

import bpo_jax
from bpo_jax import config as config_lib
from bpo_jax import estimators
from bpo_jax.learner import checkpoint as checkpoint_lib
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.models import policy as policy_lib
from bpo_jax.models import weights
from bpo_jax.rollout.dialogue import Dialogue

PROVENANCE = "provenance.json"


def run(config: config_dict.ConfigDict, workdir: str) -> pathlib.Path:
    """Writes the newest checkpoint in `workdir`, or the initial policy where there is none.

    Args:
      config: resolved; ``config.export`` says where to and how.
      workdir: an existing folder.

    Returns:
      The folder.

    Raises:
      ConfigError: the folder holds something else, or the policy cannot be loaded.
      CheckpointError: no checkpoint can be read, or not the one asked for.
    """
    settings = config.export
    target = pathlib.Path(settings.path or pathlib.Path(workdir) / "export")
    _check_target(target, workdir)
    step, policy = _policy(config, workdir)
    partial = target.with_name(f".{target.name}.partial")
    if jax.process_index() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    weights.save(
        partial,
        policy.config,
        policy.params,
        dtype=settings.dtype,
        most_bytes=int(settings.max_file_gib * 2**30),
    )
    if jax.process_index() == 0:
        _write_tokenizer(partial, policy.tokenizer, config.rollout.temperature)
        _write_json(partial / PROVENANCE, _provenance(config, target, workdir, step))
        _replace(target, partial)
        print(f"policy after update {step}: {target}", file=sys.stderr)
        if not _auto_tokenizer_agrees(target, policy.tokenizer):
            print(
                "transformers.AutoTokenizer splits words as the model type does, not as this "
                "policy learned to; load the tokenizer with PreTrainedTokenizerFast",
                file=sys.stderr,
            )
    return target


def _check_target(target: pathlib.Path, workdir: str) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        found = json.loads((target / PROVENANCE).read_text(encoding="utf-8"))
        same = found["exported_from"] == _from(target, workdir)
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise config_lib.ConfigError(
            f"export.path={str(target)!r}: holds something else than an earlier export of "
            f"--workdir={workdir}; choose another folder, or move that one away"
        )


def _from(target: pathlib.Path, workdir: str) -> str:
    """The run's folder seen from the export, so that both can be moved together."""
    return os.path.relpath(pathlib.Path(workdir).resolve(), target.resolve())


def _policy(config: config_dict.ConfigDict, workdir: str) -> tuple[int, policy_lib.Policy]:
    """The update after which it was, and the policy; parameters alone are read."""
    folder = pathlib.Path(workdir) / "checkpoints"
    step = config.export.step
    checkpoints = checkpoint_lib.Checkpoints(folder) if folder.is_dir() else None
    there = checkpoints is not None and bool(checkpoints.steps())
    if step is not None and not there:
        raise config_lib.ConfigError(f"export.step={step}: {folder} has no checkpoints; unset it")
    try:
        policy = policy_lib.load(
            seed=config.seed,
            mesh=mesh_lib.make_mesh(**config.mesh.to_dict()),
            abstract=there,
            value_head=estimators.ALGORITHMS[config.algorithm.name].critic,
            **config.policy.to_dict(),
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise config_lib.ConfigError(f"policy.init={config.policy.init!r}: {reason}") from error
    if checkpoints is None or not there:
        return 0, policy
    same = {name: config.policy[name] for name in ("init", "preset", "tokenizer")}
    found = checkpoints.restore(
        {"params": policy.params}, config={"policy": same}, step=step, part=True
    )
    assert found is not None
    return found[0], policy.with_params(found[1]["params"])


def _write_tokenizer(folder: pathlib.Path, tokenizer: Any, temperature: float) -> None:
    tokenizer.save_pretrained(folder)
    # In words that version 4 of transformers understands as well.
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop("backend", None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    _write_json(path, content)
    sampling = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": Dialogue(tokenizer).stop_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    sampling = {name: value for name, value in sampling.items() if value is not None}
    _write_json(folder / "generation_config.json", sampling)


def _auto_tokenizer_agrees(folder: pathlib.Path, tokenizer: Any) -> bool:
    """Whether the class that transformers takes for the model reads its tokenizer as we do.

    For some model types it takes one that ignores how ``tokenizer.json`` splits words, which
    matters for tokenizers made here.
    """
    import transformers  # here, since the tokenizer module silences it first

    other = transformers.AutoTokenizer.from_pretrained(folder)
    probe = "Don't open drawer 3:\n\n  you're at 12.5 café_x, (DRAWER 17)!\t1998"
    return other(probe).input_ids == tokenizer(probe).input_ids


def _provenance(
    config: config_dict.ConfigDict, target: pathlib.Path, workdir: str, step: int
) -> dict[str, Any]:
    return {
        "exported_from": _from(target, workdir),
        "step": step,
        "version": bpo_jax.__version__,
        "seed": config.seed,
        "algorithm": config.algorithm.to_dict(),
        "policy": config.policy.to_dict(),
        "environment": config.environment.to_dict(),
    }


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace(target: pathlib.Path, partial: pathlib.Path) -> None:
    """Puts `partial` in the place of `target`, which is there as a whole at nearly all times."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
