"""Weights go out to Hugging Face's format and come back the same; broken folders are refused."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from bpo_jax.models import decoder, weights
from bpo_jax.models.config import DecoderConfig
from bpo_jax.models.presets import PRESETS, preset
from tests.models.test_decoder import LLAMA, QWEN, build

BOTH = pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen", "llama"])


def tensors(folder):
    return safetensors.numpy.load_file(folder / weights.SINGLE)


def rewrite(folder, change):
    content = tensors(folder)
    change(content)
    safetensors.numpy.save_file(content, folder / weights.SINGLE)


@pytest.fixture
def saved(tmp_path):
    weights.save(tmp_path, QWEN, build(QWEN)[1])
    return tmp_path


@BOTH
def test_what_was_saved_is_loaded(config, tmp_path):
    params = build(config)[1]
    weights.save(tmp_path, config, params)
    read, loaded = weights.load(tmp_path)
    assert read == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_half_precision_rounds_once(tmp_path):
    params = build(QWEN)[1]
    weights.save(tmp_path, QWEN, params, dtype="bfloat16")
    config, loaded = weights.load(tmp_path)
    assert config.param_dtype == "bfloat16"
    rounded = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    widened = weights.load(tmp_path, dtype="float32")[1]
    assert widened["embedding"].dtype == np.float32


def test_several_files_with_an_index_are_one_model(saved):
    whole = weights.load(saved)[1]
    content = tensors(saved)
    (saved / weights.SINGLE).unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(content))}
    for file in set(where.values()):
        part = {name: content[name] for name in content if where[name] == file}
        safetensors.numpy.save_file(part, saved / file)
    (saved / weights.INDEX).write_text(json.dumps({"weight_map": where}))
    jax.tree.map(np.testing.assert_array_equal, weights.load(saved)[1], whole)


def test_a_missing_tensor_is_named(saved):
    rewrite(saved, lambda content: content.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        weights.load(saved)


def test_a_tensor_without_a_place_is_named(saved):
    rewrite(saved, lambda content: content.update(stray=np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match=r"1 tensors that .* no place for: stray"):
        weights.load(saved)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(saved, lambda content: content.update({name: np.zeros((8, 32), np.float32)}))
    with pytest.raises(ValueError, match=r"k_proj.*\(8, 32\).*asks for \(16, 32\)"):
        weights.load(saved)


def test_pickled_weights_are_refused(saved):
    (saved / weights.SINGLE).rename(saved / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"only pickled weights .*convert the model to safetensors"
    ):
        weights.load(saved)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        weights.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"use_sliding_window": True}, "full attention only"),
        ({"hidden_act": "gelu"}, "computes silu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn': expected default or llama3"),
    ],
)
def test_what_this_decoder_does_not_compute_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(QWEN.to_hf() | change)


def cut(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:50])


def put(name, text):
    return lambda folder: (folder / name).write_text(text)


def fields(**changes):
    return put(weights.CONFIG, json.dumps(QWEN.to_hf() | changes))


def fill(name, value):
    def change(content):
        content[name] = np.full_like(content[name], value, dtype=np.asarray(value).dtype)

    return lambda folder: rewrite(folder, change)


DAMAGES = {
    "a cut file of weights": (lambda f: cut(f, weights.SINGLE), weights.SINGLE),
    "a text for weights": (put(weights.SINGLE, "version https://git-lfs"), weights.SINGLE),
    "cut JSON": (lambda f: cut(f, weights.CONFIG), weights.CONFIG),
    "a list for a configuration": (put(weights.CONFIG, "[]"), "expected a JSON object, not list"),
    "deep JSON": (put(weights.CONFIG, "[" * 100_000), weights.CONFIG),
    "a missing field": (
        put(weights.CONFIG, '{"model_type": "qwen2"}'),
        "'num_attention_heads' is missing",
    ),
    "a text for a size": (fields(hidden_size="64"), "hidden_size='64'"),
    "no heads": (fields(num_attention_heads=0), weights.CONFIG),
    "a list for a number": (fields(rope_theta=[1]), weights.CONFIG),
    "a text for a rotary scaling": (fields(rope_scaling="llama3"), weights.CONFIG),
    "negative layers": (fields(num_hidden_layers=-1), "num_layers=-1"),
    "a cut index": (put(weights.INDEX, '{"weight_map": '), weights.INDEX),
    "an index without a map": (put(weights.INDEX, '{"files": []}'), "no weight_map"),
    "whole numbers": (fill("model.norm.weight", 1), "holds I64; expected F64, F32, F16, BF16"),
    "not a number": (fill("model.norm.weight", np.float32("nan")), "model.norm.weight has values"),
    "infinity": (fill("model.norm.weight", np.float32("inf")), "model.norm.weight has values"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(case, saved):
    damage, message = DAMAGES[case]
    damage(saved)
    with pytest.raises(ValueError, match=str(saved)) as raised:
        weights.load(saved)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_the_way_through_config_json(name):
    assert DecoderConfig.from_hf(json.loads(json.dumps(PRESETS[name].to_hf()))) == PRESETS[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [  # Of the released checkpoints, from their model cards' tensors.
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_a_preset_has_as_many_parameters_as_the_released_model(name, count):
    _, shapes, _ = decoder.abstract(PRESETS[name])
    assert sum(int(np.prod(s.shape)) for s in jax.tree.leaves(shapes)) == count


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="unknown model preset 'gpt'; known: tiny"):
        preset("gpt")
