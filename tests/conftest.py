"""Settings of the whole test run."""

import os

import hypothesis

# Tests state their tolerances for the CPU, and must pass on a machine without a network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Time limits per example fail at random where the first example compiles; a failure that no one can
# repeat helps nobody, so examples are derived from the test itself.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
