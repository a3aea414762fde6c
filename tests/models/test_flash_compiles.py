"""The TPU kernels compile for a TPU, at the shapes of real models. No TPU is needed, libtpu is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason='libtpu is not installed: pip install -e ".[tpu]" (about 700 MB) brings it',
    ),
]

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    # Else a second process stops at the lock of the first.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

START = """
import functools
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from bpo_jax.models import flash_attention, visibility

def mesh_of(topology, shape, **options):
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **options).devices
    return jax.make_mesh(
        shape, ("rows", "heads"), devices=devices, axis_types=(AxisType.Auto,) * 2)

def attend(q, k, v, end):
    return flash_attention.attend(q, k, v, visibility.all_tokens(end), end)

def square(attention, q, k, v, end):
    return jnp.sum(attention(q, k, v, end).astype(jnp.float32) ** 2)

def compiled(function, mesh, b, t, h, kv, d, dtype, spec=P(), spec_end=P()):
    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    arrays = [array((b, t, n, d), jnp.dtype(dtype), spec) for n in (h, kv, kv)]
    end = array((b, t), jnp.int32, spec_end)
    done = jax.jit(function).trace(*arrays, end).lower(lowering_platforms=("tpu",)).compile()
    kernels = [x for x in done.as_text().splitlines() if "tpu_custom_call" in x]
    return kernels, done.memory_analysis().temp_size_in_bytes

def names(kernels):
    known = ("forward", "d_queries", "d_keys")
    return {x for x in known if any("tree_attention_" + x in line for line in kernels)}
"""

ONE_CHIP = """
mesh = mesh_of("v5e:1x1x1", (1, 1), chips_per_host_bounds=(1, 1, 1))
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "heads",
    [(28, 4, 128), (32, 8, 128), (14, 2, 64)],
    ids=["Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-0.5B"],
)
def test_forward_and_backward_compile_for_one_chip(heads, dtype):
    run(f"""{ONE_CHIP}
gradient = jax.grad(functools.partial(square, attend), argnums=(0, 1, 2))
kernels, _ = compiled(gradient, mesh, 1, 8192, *{heads}, "{dtype}")
assert names(kernels) == {{"forward", "d_queries", "d_keys"}}, kernels
""")


def test_32k_tokens_compile_in_memory_linear_in_the_length():
    # The scores of one head alone would be 4 GiB.
    run(f"""{ONE_CHIP}
kernels, temporaries = compiled(attend, mesh, 1, 32768, 28, 4, 128, "bfloat16")
assert names(kernels) == {{"forward"}}, kernels
assert temporaries < 2**30, temporaries
""")


def test_as_many_rows_as_one_list_holds_fit_the_scalar_memory():
    run(f"""{ONE_CHIP}
rows = flash_attention.LIST_LIMIT // 64**2
gradient = jax.grad(functools.partial(square, attend), argnums=(0, 1, 2))
kernels, _ = compiled(gradient, mesh, rows, 32768, 2, 2, 64, "bfloat16")
assert len(kernels) == 3, kernels
""")


def test_rematerialised_layers_compile_on_a_mesh_of_rows_and_heads():
    run("""
mesh = mesh_of("v5e:2x2", (2, 2))
spec, spec_end = P("rows", None, "heads", None), P("rows")
local = jax.shard_map(
    attend, mesh=mesh, in_specs=(spec,) * 3 + (spec_end,), out_specs=spec, check_vma=False)

def layers(q, k, v, end):
    layer = jax.checkpoint(lambda x, _: (x + local(x, k, v, end), None))
    return jax.lax.scan(layer, q, None, length=2)[0]

gradient = jax.grad(functools.partial(square, layers), argnums=(0, 1, 2))
kernels, _ = compiled(gradient, mesh, 4, 8192, 28, 4, 128, "bfloat16", spec, spec_end)
assert names(kernels) == {"forward", "d_queries", "d_keys"}, kernels
""")
