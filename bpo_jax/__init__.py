"""Branching policy optimisation for language-model agents, on JAX.

Importing this package imports nothing else: sandbox workers must stay free of JAX.
"""

__version__ = "0.1.0"
