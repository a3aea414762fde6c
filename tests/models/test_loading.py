"""Loading: into any sharding, within bounded memory, from the hub's cache; value heads."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from bpo_jax import packaged
from bpo_jax.models import hub, policy, weights
from tests import tiny_policy
from tests.models.test_decoder import LLAMA, QWEN, build

VALUED = dataclasses.replace(QWEN, value_head=True)


# Places.

SHARDED = """
import json, sys
import jax
import numpy as np
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.models import decoder, partition, weights

config = weights.read_config(sys.argv[1])
_, shapes, axes = decoder.abstract(config)
_, whole = weights.load(sys.argv[1])
for data, fsdp, tensor in ((1, 4, 2), (2, 2, 2), (8, 1, 1)):
    mesh = mesh_lib.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    places = partition.param_shardings(mesh, shapes, axes)
    _, params = weights.load(sys.argv[1], shardings=places)
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    assert jax.tree.all(jax.tree.map(lambda p, s: p.sharding == s, params, places))
"""

DRAWN = """
import sys
import jax
import numpy as np
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.learner import optimizer, update
from bpo_jax.learner.loss import LossSettings
from bpo_jax.models import decoder, policy

settings = dict(init="random", preset=sys.argv[1], tokenizer=None, context=64, seed=3)
whole = policy.load(**settings)
mesh = mesh_lib.make_mesh(data=1, fsdp=2, tensor=2)
drawn = policy.load(**settings, mesh=mesh)
_, shapes, axes = decoder.abstract(drawn.config)
places = mesh_lib.param_shardings(mesh, shapes, axes)
jax.tree.map(np.testing.assert_array_equal, drawn.params, whole.params)
assert jax.tree.all(jax.tree.map(lambda p, s: p.sharding == s, drawn.params, places))
learner = update.make(
    drawn.config,
    loss=LossSettings(),
    optimizer=optimizer.OptimizerSettings(learning_rate=1e-2),
    mesh=mesh,
)

def buffers(params):
    shards = (s for p in jax.tree.leaves(params) for s in p.addressable_shards)
    return [s.data.unsafe_buffer_pointer() for s in shards]

assert buffers(learner.place(drawn.params)) == buffers(drawn.params)
"""


def run(code: str, *arguments: str, devices: int = 1) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_parameters_are_loaded_into_any_sharding(config, tmp_path):
    weights.save(tmp_path, config, build(config)[1])
    run(SHARDED, str(tmp_path), devices=8)


def test_random_parameters_are_drawn_where_they_live_and_stay_there(tmp_path):
    run(DRAWN, str(tiny_policy.write(tmp_path)), devices=4)


# Memory.

# Some 100 MiB are taken once, whatever the model: by compiling, and by an allocator that keeps what
# it was given back. The rest is for one tensor (32 MiB here) and its parts on the way.
MARGIN_MIB = 160
SIZES = dataclasses.replace(
    QWEN, vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_layers=10, num_heads=16,
    num_kv_heads=4, head_dim=64,
)  # fmt: skip
PEAK = """
import re, sys
import jax
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.models import decoder, partition, weights

def read(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

_, shapes, axes = decoder.abstract(weights.read_config(sys.argv[1]))
places = partition.param_shardings(mesh_lib.make_mesh(), shapes, axes)
jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the back end is up
before = read("VmRSS")
config, params = weights.load(sys.argv[1], dtype="float32", shardings=places)
assert len(params["layers"]["up"].addressable_shards) == jax.device_count()
size = sum(
    shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
) / 2**20
print(read("VmHWM") - before, size)
"""


def write_random(folder: pathlib.Path, dtype: str) -> None:
    """A checkpoint in several files, made without the code under test."""
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(SIZES.num_layers)
        for name, shape in {
            "input_layernorm.weight": (1024,),
            "post_attention_layernorm.weight": (1024,),
            "self_attn.q_proj.weight": (1024, 1024),
            "self_attn.k_proj.weight": (256, 1024),
            "self_attn.v_proj.weight": (256, 1024),
            "self_attn.o_proj.weight": (1024, 1024),
            "self_attn.q_proj.bias": (1024,),
            "self_attn.k_proj.bias": (256,),
            "self_attn.v_proj.bias": (256,),
            "mlp.gate_proj.weight": (4096, 1024),
            "mlp.up_proj.weight": (4096, 1024),
            "mlp.down_proj.weight": (1024, 4096),
        }.items()
    } | {"model.embed_tokens.weight": (8192, 1024), "model.norm.weight": (1024,)}
    where = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(shapes)}
    for file in set(where.values()):
        part = {
            name: np.full(shape, 0.01, jnp.dtype(dtype))
            for name, shape in shapes.items()
            if where[name] == file
        }
        safetensors.numpy.save_file(part, folder / file)
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": where}))
    (folder / weights.CONFIG).write_text(json.dumps(SIZES.to_hf()))


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("dtype", "devices"), [("float32", 1), ("float32", 2), ("bfloat16", 2)])
def test_loading_takes_the_memory_of_the_parameters_and_little_more(dtype, devices, tmp_path):
    write_random(tmp_path, dtype)
    peak, size = map(float, run(PEAK, str(tmp_path), devices=devices).split())
    print(f"peak {peak:.0f} MiB for {size:.0f} MiB of parameters")
    assert size > 3 * MARGIN_MIB  # so that a second copy would show
    assert peak < size + MARGIN_MIB


# Files that do not fit together.


def two_files(folder, where, content):
    for file in set(where.values()) | {"model-0.safetensors"}:
        part = {name: content[name] for name in content if where[name] == file}
        safetensors.numpy.save_file(part, folder / file)


@pytest.fixture
def split(tmp_path):
    """A folder of two files, its tensors, and where they are."""
    weights.save(tmp_path, QWEN, build(QWEN)[1])
    content = safetensors.numpy.load_file(tmp_path / weights.SINGLE)
    (tmp_path / weights.SINGLE).unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(content))}
    two_files(tmp_path, where, content)
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": where}))
    return tmp_path, content, where


def test_a_tensor_in_two_files_is_refused(split):
    folder, content, where = split
    part = {name: content[name] for name in content if where[name] == "model-1.safetensors"}
    part["model.norm.weight"] = content["model.norm.weight"]
    part["model.embed_tokens.weight"] = content["model.embed_tokens.weight"]
    safetensors.numpy.save_file(part, folder / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"is both in model-0.* and in model-1"):
        weights.load(folder)


def test_a_tensor_twice_in_the_index_is_refused(split):
    folder, _, _ = split
    name = '"model.norm.weight": '
    text = (folder / weights.INDEX).read_text()
    (folder / weights.INDEX).write_text(text.replace(name, f'{name}"other", {name}'))
    with pytest.raises(ValueError, match=r"model\.norm\.weight stands there twice"):
        weights.load(folder)


def test_an_index_that_points_to_the_wrong_file_is_refused(split):
    folder, _, where = split
    where["model.norm.weight"] = {
        "model-0.safetensors": "model-1.safetensors",
        "model-1.safetensors": "model-0.safetensors",
    }[where["model.norm.weight"]]
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight should be in model-"):
        weights.load(folder)


def test_an_index_that_points_outside_the_folder_is_refused(split):
    folder, _, where = split
    where["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match="names files outside the folder"):
        weights.load(folder)


# The value head.


def test_a_value_head_that_is_not_there_is_zero(tmp_path):
    weights.save(tmp_path, QWEN, build(QWEN)[1])
    _, params = weights.load(tmp_path, VALUED)
    assert not np.any(params["value"]) and not np.any(params["value_bias"])
    model = nnx.merge(build(VALUED)[0], params)
    values = model.values(jnp.ones((2, 3, QWEN.hidden_size)))
    assert values.shape == (2, 3) and values.dtype == jnp.float32


def test_a_value_head_is_saved_beside_the_model(tmp_path):
    params = build(VALUED)[1]
    weights.save(tmp_path, VALUED, params)
    _, loaded = weights.load(tmp_path, VALUED)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    read, without = weights.load(tmp_path)
    assert read == QWEN and "value" not in without
    hidden = np.random.default_rng(0).normal(size=(1, 2, QWEN.hidden_size)).astype(np.float32)
    values = nnx.merge(build(VALUED)[0], loaded).values(hidden)
    np.testing.assert_allclose(values, hidden @ params["value"] + params["value_bias"], rtol=1e-5)


def test_a_decoder_without_a_value_head_says_so():
    model = nnx.merge(*build(QWEN))
    with pytest.raises(ValueError, match="build it with value_head=True"):
        model.values(jnp.ones((1, 1, QWEN.hidden_size)))


# The hub.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub's cache with one model, as a download leaves it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "models--owner--model"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    tiny_policy.write(snapshot)
    config = weights.read_config(snapshot)
    weights.save(snapshot, config, build(config)[1])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_a_hub_id_is_taken_from_the_cache(cache):
    found = policy.load(init="owner/model", preset="", tokenizer=None, context=64, seed=0)
    expected = build(found.config)[1]
    jax.tree.map(np.testing.assert_array_equal, found.params, expected)


def test_only_files_that_run_no_code_are_fetched(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(name, **settings):
        asked.update(settings, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.local("owner/model") == tmp_path
    assert asked["name"] == "owner/model"
    patterns = set(asked["allow_patterns"])
    files = ["model.safetensors", "config.json", "merges.txt", "pytorch_model.bin", "model.py"]
    files += ["original/model.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=list(patterns), ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == ["model.safetensors", "config.json", "merges.txt"]
    hub.local("owner/model", weights=False)
    assert "*.safetensors" not in asked["allow_patterns"]


def test_a_hub_id_that_cannot_be_fetched_is_one_line(cache):
    with pytest.raises(hub.HubError) as raised:
        hub.local("owner/other")
    message = str(raised.value)
    assert message.startswith("owner/other: no such folder, and it cannot be fetched")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", True),
        ("tests/mistyped", False),  # the first part is a folder here
        ("/tmp/model", False),
        ("./model", False),
        ("model", False),
        ("a/b/c", False),
        ("package:quickstart", False),
    ],
)
def test_a_path_is_not_taken_for_a_hub_id(name, expected, monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    assert packaged.is_hub_id(name) is expected
