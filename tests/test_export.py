"""Exports: a checkpoint becomes a folder that this program and transformers load."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bpo_jax import config as config_lib
from bpo_jax import experiment, export
from bpo_jax.models import decoder, policy, weights
from bpo_jax.rollout.dialogue import Dialogue
from tests import tiny_policy


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return tiny_policy.write(tmp_path_factory.mktemp("tiny"))


def make_config(preset, mode="export", **changes):
    config = config_lib.base()
    config.policy.preset = str(preset)
    config.policy.context = 384
    config.budget.updates = 1
    config.batch.row_length = 384
    config.loss.kl_weight = 0.01
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    return config_lib.resolve(config, mode=mode)


@pytest.fixture(scope="module")
def trained(preset, tmp_path_factory):
    """A workdir with a checkpoint whose parameters are not those of the start, and these."""
    workdir = tmp_path_factory.mktemp("run")
    run = experiment.Run(make_config(preset, mode="train"), str(workdir))
    run.ledger.updates = 7
    run.commit()
    moved = jax.tree.map(lambda p: p + 0.01, run.state.params)
    run.checkpoints.save(7, dataclasses.replace(run.state, params=moved), run.committed)
    run.checkpoints.close()
    return workdir, moved


@pytest.fixture
def workdir(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "run")


def test_the_newest_checkpoint_is_exported(trained, workdir, preset):
    target = export.run(make_config(preset), str(workdir))
    assert target == workdir / "export"
    config, params = weights.load(target)
    assert config.vocab_size == 512
    jax.tree.map(np.testing.assert_array_equal, params, trained[1])
    provenance = json.loads((target / "provenance.json").read_text())
    assert provenance["step"] == 7
    assert str(workdir) not in json.dumps(provenance)
    assert [path.name for path in workdir.iterdir() if path.name.startswith(".")] == []


def test_without_a_checkpoint_the_initial_policy_is_exported(preset, tmp_path):
    target = export.run(make_config(preset), str(tmp_path))
    _, params = weights.load(target)
    config = weights.read_config(preset)
    jax.tree.map(np.testing.assert_array_equal, params, decoder.init(config, seed=0)[1])
    assert json.loads((target / "provenance.json").read_text())["step"] == 0


def test_an_export_is_a_policy_to_begin_with(workdir, preset):
    target = export.run(make_config(preset), str(workdir))
    loaded = policy.load(init=str(target), preset="", tokenizer=None, context=64, seed=0)
    words = policy.load(init="random", preset=str(preset), tokenizer=None, context=64, seed=0)
    text = "You see a drawer 3."
    assert loaded.tokenizer(text).input_ids == words.tokenizer(text).input_ids
    assert loaded.tokenizer.chat_template == words.tokenizer.chat_template
    sampling = json.loads((target / "generation_config.json").read_text())
    assert sampling["eos_token_id"] == Dialogue(words.tokenizer).stop_id
    assert sampling["temperature"] == 1.0


def test_a_large_model_is_split_and_half_precision_is_asked_for(workdir, preset):
    changed = make_config(preset, export__max_file_gib=1e-5, export__dtype="bfloat16")
    target = export.run(changed, str(workdir))
    index = json.loads((target / weights.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert weights.read_config(target).param_dtype == "bfloat16"
    weights.load(target)


def test_an_earlier_export_of_the_run_is_replaced(workdir, preset):
    export.run(make_config(preset, export__max_file_gib=1e-5), str(workdir))
    target = export.run(make_config(preset), str(workdir))
    assert not (target / weights.INDEX).exists()
    weights.load(target)


def test_other_files_are_not_overwritten(workdir, preset, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    export.run(make_config(preset, export__path=str(other)), str(workdir))  # an empty folder
    (other / "provenance.json").write_text("{}")
    with pytest.raises(config_lib.ConfigError, match=r"export\.path=.*holds something else"):
        export.run(make_config(preset, export__path=str(other)), str(workdir))
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(config_lib.ConfigError, match=r"export\.path=.*holds something else"):
        export.run(make_config(preset, export__path=str(file)), str(workdir))


def test_the_export_of_another_run_is_not_overwritten(workdir, preset, tmp_path):
    target = str(tmp_path / "shared")
    export.run(make_config(preset, export__path=target), str(workdir))
    second = tmp_path / "second"
    second.mkdir()
    with pytest.raises(config_lib.ConfigError, match=r"earlier export of --workdir=.*second"):
        export.run(make_config(preset, export__path=target), str(second))


def test_a_step_that_is_not_there_is_refused(workdir, preset, tmp_path):
    with pytest.raises(RuntimeError, match="no checkpoint of step 3; there are: 7"):
        export.run(make_config(preset, export__step=3), str(workdir))
    with pytest.raises(config_lib.ConfigError, match=r"export\.step=3: .* has no checkpoints"):
        export.run(make_config(preset, export__step=3), str(tmp_path))


def test_a_tokenizer_that_transformers_would_replace_is_pointed_out(preset, tmp_path, capsys):
    # Its class for qwen2 splits numbers from the space before them; ours does not.
    export.run(make_config(preset), str(tmp_path))
    assert "load the tokenizer with PreTrainedTokenizerFast" in capsys.readouterr().err


def test_transformers_loads_an_export(trained, workdir, preset):
    torch = pytest.importorskip("torch", reason="install the extra [parity]")
    import transformers

    target = export.run(make_config(preset, export__max_file_gib=1e-5), str(workdir))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(target)
    messages = [{"role": "user", "content": "You see a drawer 3."}]
    prompt = words.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="np", return_dict=True
    )
    tokens = np.asarray(prompt["input_ids"])
    ours = Dialogue(policy.tokenizer_lib.load(preset)).prompt_ids(messages)
    np.testing.assert_array_equal(tokens[0], ours)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    graphdef, _, _ = decoder.abstract(weights.read_config(target))
    model = nnx.merge(graphdef, trained[1])
    length = tokens.shape[1]
    position = jnp.arange(length)[None]
    hidden = model(jnp.asarray(tokens), position, jnp.full(tokens.shape, length))
    np.testing.assert_allclose(hidden @ model.head_dv(), expected, atol=2e-5)
    assert theirs.generation_config.eos_token_id == Dialogue(words).stop_id
