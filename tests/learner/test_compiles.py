"""The learner's steps compile for a TPU pod that is not there, at the width of 7B and 8B models."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
    ),
]

SCRIPT = """
import json, sys
import jax
from jax.experimental import topologies
from bpo_jax import packing
from bpo_jax.learner import mesh as mesh_lib, update as update_lib
from bpo_jax.learner.loss import LossSettings
from bpo_jax.learner.optimizer import OptimizerSettings
from bpo_jax.models import decoder, presets
from tests import trees

tree = trees.random_tree(0)
(batch,) = packing.pack([tree], [trees.random_weights(tree, 0)], rows=16, row_length=8192)
batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
for sizes in ({"fsdp": 16}, {"fsdp": 8, "tensor": 2}):
    mesh = mesh_lib.make_mesh(**sizes, devices=list(topology.devices))
    config = presets.preset(sys.argv[1], num_layers=2, dtype="bfloat16", remat="full")
    learner = update_lib.make(
        config, loss=LossSettings(), optimizer=OptimizerSettings(learning_rate=1e-6), mesh=mesh
    )
    shapes = decoder.abstract(config)[1]
    totals = jax.eval_shape(learner.zeros, shapes)
    step = learner.accumulate.lower(shapes, totals, batch).compile()
    memory, text = step.memory_analysis(), step.as_text()
    state = jax.eval_shape(learner.start, shapes)
    learner.apply.lower(state, totals).compile()
    print(json.dumps({
        "sizes": sizes,
        "peak_gib": memory.peak_memory_in_bytes / 2**30,
        "kernels": text.count("tpu_custom_call"),
    }), flush=True)
"""
TOPOLOGY = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    # A second process would abort on the lock of the first.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Whether it compiles does not depend on how fast the result is, and this takes a third as long.
    "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0",
}


@pytest.mark.parametrize("preset", ["qwen2.5-7b", "llama-3.1-8b"])
def test_two_layers_of_a_learner_step_compile_for_a_pod(preset):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, preset], env=os.environ | TOPOLOGY, capture_output=True,
        text=True, timeout=900, cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 2
    for report in reports:
        # Two layers with embedding and head, float32 master weights, gradients in float32.
        assert report["peak_gib"] < 15.75, report
        # Forward, forward again, and two kernels of the backward pass.
        assert report["kernels"] >= 4, report
        print(report)
