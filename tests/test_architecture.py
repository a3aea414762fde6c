"""Which part may import which: the floors of the program, kept by reading every import."""

import ast
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

PACKAGE = "bpo_jax"
ROOT = pathlib.Path(__file__).parents[1] / PACKAGE

FLOORS = {
    "main": 6,
    "experiment": 5,
    "evaluation": 5,
    "warmstart": 5,
    "export": 5,
    "rollout": 4,
    "learner": 4,
    # Checks values against what the estimators declare. Nothing below the loop reads a config:
    # parts take plain arguments.
    "config": 4,
    "config_checks": 4,
    "estimators": 3,
    "models": 3,
    "sandbox": 3,
    "environments": 3,
    "packing": 2,
    "layout": 2,
    "tree_files": 2,
    "action_formats": 1,
    "tree": 1,
    "ledger": 1,
    "packaged": 1,
    "interrupt": 1,
    "disk": 1,
    "profiling": 1,
}
"""A part imports only from lower floors."""

REPORT = "report"
"""Stands beside the floors: it reads what a run left in its folder, and knows nothing else."""

PEERS = {
    # The loop is read in one file; what it calls stands beside it.
    ("experiment", "evaluation"),
    ("experiment", "warmstart"),
    ("warmstart", "evaluation"),
    # What goes into rows, and where in a row it lies.
    ("packing", "layout"),
    # The keys and what refuses their values.
    ("config", "config_checks"),
    # The rule of branching knows which of its settings make sense together; it needs no JAX.
    ("config_checks", "rollout"),
    # The contracts that environments fulfil are declared with the sandboxes.
    ("environments", "sandbox"),
}
"""(importer, imported) on the same floor that are meant."""

JAX_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


def part_of(module: str) -> str:
    """The second name of a dotted module name, "" for the package itself and other packages."""
    names = module.split(".")
    return names[1] if names[0] == PACKAGE and len(names) > 1 else ""


def imported_modules(source: str, module: str, is_package: bool = False) -> set[str]:
    """Absolute names of all that a source imports, wherever in the file the import stands.

    `from a import b` counts as both a and a.b, since b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module if is_package else module.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return found


def modules() -> Iterator[tuple[str, set[str]]]:
    """Every module of the package with what it imports."""
    for path in sorted(ROOT.rglob("*.py")):
        names = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        is_package = names[-1] == "__init__"
        module = ".".join(names[:-1] if is_package else names)
        yield module, imported_modules(path.read_text(encoding="utf-8"), module, is_package)


def parts(imported: set[str]) -> set[str]:
    return {part_of(name) for name in imported} & {*FLOORS, REPORT}


def libraries(imported: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in imported}


# Each rule takes a module and what it imports, and returns the imports that break the rule.


def lower_floors_never_import_upper_ones(module: str, imported: set[str]) -> set[str]:
    part = part_of(module)
    if part not in FLOORS:
        return set()
    return {
        other
        for other in parts(imported) - {part, REPORT}
        if FLOORS[other] >= FLOORS[part] and (part, other) not in PEERS
    }


def the_package_itself_imports_nothing(module: str, imported: set[str]) -> set[str]:
    return imported if module == PACKAGE else set()


def reports_read_a_folder_and_only_the_loop_knows_them(module: str, imported: set[str]) -> set[str]:
    part = part_of(module)
    if part == REPORT:
        return parts(imported) - {REPORT}
    return parts(imported) & {REPORT} if FLOORS.get(part, 0) < 5 else set()


def estimators_do_not_know_where_a_tree_came_from(module: str, imported: set[str]) -> set[str]:
    if part_of(module) != "estimators":
        return set()
    return parts(imported) & {"rollout", "learner", "models", "sandbox", "environments"}


def sandboxes_and_environments_never_import_jax(module: str, imported: set[str]) -> set[str]:
    if part_of(module) not in ("sandbox", "environments"):
        return set()
    return libraries(imported) & JAX_LIBRARIES


def only_rollout_knows_both_a_policy_and_a_sandbox(module: str, imported: set[str]) -> set[str]:
    part = part_of(module)
    # The loop (floor 5) puts the parts together by name; it steps and samples through rollout.
    if part == "rollout" or FLOORS.get(part, 0) >= 5:
        return set()
    known = parts(imported) | {part}
    worlds = known & {"sandbox", "environments"}
    policies = known & {"models", "learner", "rollout"}
    return worlds | policies if worlds and policies else set()


def only_learner_knows_an_optimiser(module: str, imported: set[str]) -> set[str]:
    return libraries(imported) & {"optax"} if part_of(module) != "learner" else set()


RULES: list[Callable[[str, set[str]], set[str]]] = [
    lower_floors_never_import_upper_ones,
    the_package_itself_imports_nothing,
    reports_read_a_folder_and_only_the_loop_knows_them,
    estimators_do_not_know_where_a_tree_came_from,
    sandboxes_and_environments_never_import_jax,
    only_rollout_knows_both_a_policy_and_a_sandbox,
    only_learner_knows_an_optimiser,
]


def test_every_part_has_a_floor():
    assert {part_of(module) for module, _ in modules()} <= {"", REPORT, *FLOORS}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_every_module(rule):
    broken = {module: rule(module, imported) for module, imported in modules()}
    assert not {module: names for module, names in broken.items() if names}


VIOLATIONS = [
    (lower_floors_never_import_upper_ones, "tree", "import bpo_jax.packing"),
    (lower_floors_never_import_upper_ones, "models.decoder", "from ..rollout import engine"),
    (lower_floors_never_import_upper_ones, "rollout.engine", "from bpo_jax import learner"),
    (lower_floors_never_import_upper_ones, "packing", "def f():\n  import bpo_jax.experiment"),
    (lower_floors_never_import_upper_ones, "ledger", "import_module('bpo_jax.tree')"),
    (lower_floors_never_import_upper_ones, "learner.update", "from bpo_jax import config"),
    (the_package_itself_imports_nothing, "", "import jax"),
    (reports_read_a_folder_and_only_the_loop_knows_them, "report.curves", "from .. import tree"),
    (reports_read_a_folder_and_only_the_loop_knows_them, "learner.loss", "import bpo_jax.report"),
    (estimators_do_not_know_where_a_tree_came_from, "estimators.bpo", "from .. import sandbox"),
    (sandboxes_and_environments_never_import_jax, "sandbox.pool", "from jax import numpy"),
    (sandboxes_and_environments_never_import_jax, "environments.x.y", "import flax.nnx as nnx"),
    (only_rollout_knows_both_a_policy_and_a_sandbox, "learner.loss", "import bpo_jax.sandbox"),
    (only_rollout_knows_both_a_policy_and_a_sandbox, "models.x", "import bpo_jax.environments"),
    (only_learner_knows_an_optimiser, "experiment", "import optax"),
]


@pytest.mark.parametrize(("rule", "name", "source"), VIOLATIONS)
def test_rule_notices_a_violation(rule, name, source):
    module = f"{PACKAGE}.{name}".rstrip(".")
    assert rule(module, imported_modules(source, module, is_package=not name))


def test_every_rule_has_a_violation_that_it_notices():
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)


def test_estimators_do_not_care_how_a_policy_reads():
    for path in (ROOT / "estimators").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not read & {"context_ids", "fresh"}, path.name


def test_meant_imports_break_no_rule():
    module = f"{PACKAGE}.rollout.grower"
    source = "import jax\nfrom bpo_jax import models, tree\nfrom bpo_jax.sandbox import api"
    assert not any(rule(module, imported_modules(source, module)) for rule in RULES)


def test_importing_sandboxes_and_environments_loads_no_jax():
    # Static rules see direct imports only; a library in between may bring JAX along.
    names = [m for m, _ in modules() if part_of(m) in ("sandbox", "environments")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = sorted({JAX_LIBRARIES!r} & set(sys.modules))\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
