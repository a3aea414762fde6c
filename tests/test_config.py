"""What a configuration may hold; every refusal is one line that names the key and the way out."""

import pathlib

import pytest
from ml_collections import config_dict

from bpo_jax import config as config_lib
from bpo_jax import config_checks, estimators
from bpo_jax.models import presets
from bpo_jax.rollout import dialogue
from bpo_jax.rollout.branching import PLACEMENTS, BranchingConfig


def make_config(**changes):
    config = config_lib.base()
    config.budget.updates = 1
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


def resolve(config, mode="train"):
    return config_lib.resolve(config, mode=mode)


def test_every_key_of_the_base_is_commented():
    source = pathlib.Path(config_lib.__file__).read_text()
    body = source[source.index("def base()") : source.index("def check_shape(")]
    lines = [line.strip() for line in body.splitlines()]
    sections = [i for i, line in enumerate(lines) if line.endswith("config_dict.ConfigDict()")]
    for index, line in enumerate(lines):
        skipped = index in sections or line.startswith(("optional =", "config ="))
        if " = " in line and not skipped:
            assert "#" in line or lines[index - 1].startswith("#"), line


@pytest.mark.parametrize("name", sorted(estimators.ALGORITHMS))
def test_every_algorithm_works_with_its_implied_values_and_ten_returns(name):
    resolved = resolve(make_config(algorithm__name=name))
    roots, b = resolved.algorithm.roots, resolved.branching
    forks = b.placement != "none"
    assert (b.siblings > 1) == forks
    assert (b.forks_per_root > 0) == forks
    assert roots * (1 + b.forks_per_root * (b.siblings - 1)) == 10


@pytest.mark.parametrize("name", sorted(estimators.ALGORITHMS))
def test_an_algorithm_names_placements_that_exist(name):
    assert set(estimators.ALGORITHMS[name].placements) <= set(PLACEMENTS)


@pytest.mark.parametrize("name", sorted(estimators.ALGORITHMS))
def test_what_an_algorithm_implies_are_keys_that_are_left_open_by_default(name):
    base = config_lib.base()
    for key, value in estimators.ALGORITHMS[name].implies.items():
        section, _, entry = key.partition(".")
        assert base[section][entry] is None, key
        assert isinstance(value, base[section].get_type(entry)), key


def test_a_setting_left_open_is_what_the_estimator_itself_takes():
    resolved = resolve(make_config(algorithm__name="gigpo")).algorithm
    assert (resolved.omega, resolved.gamma) == (1.0, 0.95)
    assert (
        resolve(make_config(algorithm__name="gigpo", algorithm__gamma=0.5)).algorithm.gamma == 0.5
    )
    bpo = resolve(make_config()).algorithm
    assert (bpo.omega, bpo.lam, bpo.gamma) == (None, None, 1.0)


def test_bpo_refuses_forks_chosen_after_the_fact():
    for placement in ("post_hoc_top_m", "post_hoc_ht"):
        with pytest.raises(config_lib.ConfigError, match=r"branching\.placement='post_hoc"):
            resolve(make_config(branching__placement=placement))


def test_the_environment_is_given_the_action_format():
    config = make_config(environment__action_format="react")
    assert config_lib.make_environment(config).action_format == "react"
    assert config_lib.make_environment(make_config()).action_format == "plain"


def test_the_least_limit_of_observations_is_the_dialogues():
    least = config_checks._AT_LEAST["rollout.observation_tokens"]
    assert least == dialogue.LEAST_OBSERVATION


def test_resolving_leaves_the_given_config_alone_and_locks_the_copy():
    config = make_config()
    resolved = resolve(config)
    assert config.branching.placement is None
    with pytest.raises(AttributeError):
        resolved.nothing = 1


BAD = {
    "unknown algorithm": ({"algorithm__name": "sarsa"}, "algorithm.name='sarsa'"),
    "no sibling and one root": (
        {"algorithm__roots": 1, "branching__siblings": 1},
        "branching.siblings=1",
    ),
    "no fork and one root": (
        {"algorithm__roots": 1, "branching__forks_per_root": 0},
        "algorithm.roots=1",
    ),
    "a group of one": ({"algorithm__name": "rloo", "algorithm__roots": 1}, "algorithm.roots=1"),
    "a flat algorithm with forks": (
        {"algorithm__name": "rloo", "branching__forks_per_root": 2},
        "branching.forks_per_root=2",
    ),
    "a flat algorithm with siblings": (
        {"algorithm__name": "grpo", "branching__siblings": 3},
        "branching.siblings=3",
    ),
    "a flat algorithm with a placement": (
        {"algorithm__name": "rloo", "branching__placement": "threshold"},
        "branching.placement='threshold'",
    ),
    "unknown placement": ({"branching__placement": "best"}, "branching.placement='best'"),
    "forks with one child": ({"branching__siblings": 1}, "branching.siblings=1"),
    "another algorithm's setting": (
        {"algorithm__name": "rloo", "algorithm__flow_exponent": 0.5},
        "algorithm.flow_exponent=0.5",
    ),
    "another algorithm's rows": ({"algorithm__row_per_step": True}, "algorithm.row_per_step=True"),
    "another algorithm's baseline": (
        {"algorithm__name": "rloo", "algorithm__roots": 1, "algorithm__baseline": True},
        "algorithm.baseline=True",
    ),
    "a baseline beside other roots": ({"algorithm__baseline": True}, "algorithm.baseline=True"),
    "a baseline and forks with one child": (
        {
            "algorithm__roots": 1,
            "algorithm__baseline": True,
            "branching__siblings": 1,
            "branching__forks_per_root": 0,
        },
        "branching.siblings=1",
    ),
    "one root, no fork and no baseline": (
        {"algorithm__roots": 1, "branching__placement": "none"},
        "algorithm.roots=1",
    ),
    "gamma 0": ({"algorithm__gamma": 0.0}, "algorithm.gamma=0.0"),
    "quantile 1": ({"branching__quantile": 1.0}, "branching.quantile=1.0"),
    "negative learning rate": (
        {"optimizer__learning_rate": -1e-3},
        "optimizer.learning_rate=-0.001",
    ),
    "learning rate nan": (
        {"optimizer__learning_rate": float("nan")},
        "optimizer.learning_rate=nan",
    ),
    "clip 0": ({"loss__clip_low": 0.0}, "loss.clip_low=0.0"),
    "clip 1": ({"loss__clip_low": 1.0}, "loss.clip_low=1.0"),
    "dual clip below 1": ({"loss__dual_clip": 0.5}, "loss.dual_clip=0.5"),
    "lambda above 1": (
        {"algorithm__name": "ppo", "algorithm__lam": 1.5},
        "algorithm.lam=1.5",
    ),
    "negative omega": (
        {"algorithm__name": "gigpo", "algorithm__omega": -1.0},
        "algorithm.omega=-1.0",
    ),
    "a limit on forks that are drawn independently": (
        {"algorithm__name": "post_hoc_ht", "branching__forks_per_tree": 3},
        "branching.forks_per_tree=3",
    ),
    "unknown ratio": ({"loss__ratio": "turn"}, "loss.ratio='turn'"),
    "importance cap 0": ({"loss__importance_cap": 0.0}, "loss.importance_cap=0.0"),
    "a critic's loss without a critic": ({"loss__value_weight": 0.5}, "loss.value_weight=0.5"),
    "a critic's warm-up without a critic": ({"loss__value_warmup": 3}, "loss.value_warmup=3"),
    "a critic that learns nothing": (
        {"algorithm__name": "ppo", "loss__value_weight": 0.0},
        "loss.value_weight=0.0",
    ),
    "value clip 0": (
        {"algorithm__name": "ppo", "loss__value_clip": 0.0},
        "loss.value_clip=0.0",
    ),
    "negative directions": ({"log__gradient_directions": -1}, "log.gradient_directions=-1"),
    "an omega for another algorithm": ({"algorithm__omega": 1.0}, "algorithm.omega=1.0"),
    "unknown kl": ({"loss__kl_estimator": "k9"}, "loss.kl_estimator='k9'"),
    "negative kl": ({"loss__kl_weight": -0.1}, "loss.kl_weight=-0.1"),
    "unknown schedule": ({"optimizer__schedule": "step"}, "optimizer.schedule='step'"),
    "no tasks": ({"batch__tasks": 0}, "batch.tasks=0"),
    "minibatches that do not divide": (
        {"batch__tasks": 8, "batch__minibatches": 3},
        "batch.minibatches=3",
    ),
    "row of an odd length": ({"batch__row_length": 2000}, "batch.row_length=2000"),
    "row shorter than a branch": ({"batch__row_length": 512}, "batch.row_length=512"),
    "path shorter than a branch": ({"batch__path_length": 700}, "batch.path_length=700"),
    "path longer than a row": ({"batch__path_length": 4096}, "batch.path_length=4096"),
    "bucket of an odd length": ({"batch__row_buckets": (1000,)}, "batch.row_buckets=(1000,)"),
    "bucket longer than a row": ({"batch__row_buckets": (2176,)}, "batch.row_buckets=(2176,)"),
    "bucket that is no number": ({"batch__row_buckets": ("a",)}, "batch.row_buckets=('a',)"),
    "rows that do not divide": (
        {"cpu_devices": 2, "batch__rows": 3, "mesh__fsdp": 2},
        "batch.rows=3",
    ),
    "rows that the devices left do not divide": ({"cpu_devices": 3}, "batch.rows=2"),
    "a mesh larger than the devices": ({"mesh__data": 2}, "mesh.data=2"),
    "a mesh that does not fit the devices": (
        {"cpu_devices": 2, "mesh__tensor": 3},
        "mesh.data=1 mesh.fsdp=-1 mesh.tensor=3",
    ),
    "two sizes left open": ({"mesh__data": -1}, "mesh.data=-1"),
    "mesh axis of no devices": ({"mesh__data": 0}, "mesh.data=0"),
    "mesh axis 0": ({"mesh__tensor": 0}, "mesh.tensor=0"),
    "no room for a prompt": (
        {"policy__context": 16, "rollout__action_tokens": 16},
        "policy.context=16",
    ),
    "unknown overflow": ({"rollout__overflow": "cut"}, "rollout.overflow='cut'"),
    "a limit of observations that nothing keeps": (
        {"rollout__observation_tokens": 100},
        "rollout.observation_tokens=100",
    ),
    "a limit that leaves nothing of observations": (
        {"rollout__overflow": "clip", "rollout__observation_tokens": 10},
        "rollout.observation_tokens=10",
    ),
    "no date": ({"rollout__date": "today"}, "rollout.date='today'"),
    "unknown action format": (
        {"environment__action_format": "xml"},
        "environment: unknown action format 'xml'",
    ),
    "greedy training": ({"rollout__temperature": 0.0}, "rollout.temperature=0.0"),
    "negative temperature": ({"rollout__temperature": -1.0}, "rollout.temperature=-1.0"),
    "missing data": ({"environment__data": "/no/such/folder"}, "environment.data="),
    "missing environment": (
        {"environment__factory": "bpo_jax.environments.chess:make"},
        "environment.factory=",
    ),
    "environment without a function": (
        {"environment__factory": "bpo_jax.environments.alfworld"},
        "environment.factory=",
    ),
    "unknown split": ({"eval__split": "holdout"}, "eval.split='holdout'"),
    "a factory's own refusal": ({"environment__settings": {"size": "huge"}}, "environment: "),
    "a setting the factory has not": ({"environment__settings": {"color": 1}}, "environment: "),
    "missing policy": ({"policy__init": "/no/such/model"}, "policy.init="),
    "missing packaged policy": ({"policy__init": "package:nothing"}, "policy.init="),
    "unknown dtype": ({"policy__dtype": "float8"}, "policy.dtype='float8'"),
    "no budget": ({"budget__updates": None}, "budget: nothing is set"),
    "budget 0": ({"budget__decoded_tokens": 0}, "budget.decoded_tokens=0"),
    "cosine without an end": (
        {"budget__updates": None, "budget__returns": 9, "optimizer__schedule": "cosine"},
        "optimizer.schedule='cosine'",
    ),
    "negative seed": ({"seed": -1}, "seed=-1"),
    "seed beyond 32 bits": ({"seed": 2**32}, "seed=4294967296"),
    "a count beyond 32 bits": ({"budget__updates": 2**31}, "budget.updates=2147483648"),
    "absurdly many devices": ({"cpu_devices": 10**6}, "cpu_devices=1000000"),
    "absurd learning rate": ({"optimizer__learning_rate": 1e300}, "optimizer.learning_rate=1e+300"),
    "a factory that its module lacks": (
        {"environment__factory": "bpo_jax.environments.alfworld:fake"},
        "environment.factory='bpo_jax.environments.alfworld:fake': bpo_jax.environments",
    ),
    "a factory that is no function": (
        {"environment__factory": "bpo_jax.tree:__name__"},
        "environment.factory='bpo_jax.tree:__name__': bpo_jax.tree has no function",
    ),
    "a factory of something else": (
        {"environment__factory": "builtins:dict"},
        "environment.factory='builtins:dict': expected a function that returns",
    ),
    "all of an endless split": ({"eval__split": "train", "eval__tasks": 0}, "eval.tasks=0"),
    "empty name of a packaged policy": ({"policy__init": "package:"}, "policy.init='package:'"),
    "unknown preset": ({"policy__preset": "gpt"}, "policy.preset='gpt'"),
    "missing tokenizer": ({"policy__tokenizer": "/no/words"}, "policy.tokenizer='/no/words'"),
    "no fork in a tree and one root": (
        {"algorithm__roots": 1, "branching__forks_per_tree": 0},
        "branching.forks_per_tree=0",
    ),
    "no turn to fork at and one root": (
        {"algorithm__roots": 1, "environment__max_turns": 4, "branching__min_gap": 4},
        "branching.min_gap=4",
    ),
    "a flat algorithm with a quantile": (
        {"algorithm__name": "rloo", "branching__quantile": 0.5},
        "branching.quantile=0.5",
    ),
    "no placement but nesting": (
        {"branching__placement": "none", "branching__nested": True},
        "branching.nested=True",
    ),
    "fixed forks without turns": ({"branching__placement": "fixed"}, "branching.turns is empty"),
    "fixed forks at the start": (
        {"branching__placement": "fixed", "branching__turns": (0, 2)},
        "branching.turns=(0, 2)",
    ),
    "turns of another placement": ({"branching__turns": (2,)}, "branching.turns=(2,)"),
    "probes that nobody asks for": ({"branching__probes": 4}, "branching.probes=4"),
    "a boundary without a marker": (
        {"branching__boundary": "marker"},
        "branching.markers=()",
    ),
    "an unknown boundary": ({"branching__boundary": "word"}, "branching.boundary='word'"),
    "one slot, and probes": (
        {"branching__entropy": "probe", "rollout__slots": 1},
        "rollout.slots=1",
    ),
    "no sandbox threads": ({"rollout__sandbox_threads": 0}, "rollout.sandbox_threads=0"),
    "no seconds for a sandbox": ({"rollout__step_seconds": 0.0}, "rollout.step_seconds=0.0"),
    "no checkpoint kept": ({"checkpoint__keep": 0}, "checkpoint.keep=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_config_that_cannot_work_is_refused_in_one_line(case):
    changes, start = BAD[case]
    with pytest.raises(config_lib.ConfigError) as raised:
        resolve(make_config(**changes))
    message = str(raised.value)
    assert message.startswith(start)
    assert "\n" not in message
    assert len(message) > len(start) + 10  # it says what was expected, too


@pytest.mark.parametrize(
    "branching",
    [{"placement": "none"}, {"forks_per_root": 0}, {"forks_per_tree": 0}, {"min_gap": 99}],
)
def test_one_root_that_never_forks_needs_the_baseline(branching):
    changes = {"algorithm__roots": 1}
    changes |= {f"branching__{name}": value for name, value in branching.items()}
    with pytest.raises(config_lib.ConfigError, match=r"or algorithm\.baseline=True$"):
        resolve(make_config(**changes))
    resolved = resolve(make_config(**changes, algorithm__baseline=True))
    BranchingConfig(**resolved.branching.to_dict())


def test_one_root_that_forks_may_have_the_baseline():
    for baseline in (False, True):
        config = make_config(algorithm__roots=1, algorithm__baseline=baseline)
        assert resolve(config).branching.placement == "threshold"


def test_the_markers_inside_a_turn_are_those_of_the_action_format():
    config = make_config(branching__boundary="marker", environment__action_format="think_action")
    assert resolve(config).branching.markers == ("<action>",)
    config.branching.markers = ("THEN",)
    assert resolve(config).branching.markers == ("THEN",)


def test_rows_per_step_are_for_rloo():
    resolved = resolve(make_config(algorithm__name="rloo", algorithm__row_per_step=True))
    assert resolved.algorithm.row_per_step


def without(section, name):
    config = make_config()
    del config[section][name]
    return config


def with_key(section, name):
    config = make_config()
    config[section][name] = 1
    return config


def retyped(section, name, value):
    config = make_config()
    with config.ignore_type():
        config[section][name] = value
    return config


MISSHAPEN = {
    "nothing returned": (lambda: None, "the configuration is None"),
    "a dict": (lambda: config_lib.base().to_dict(), "the configuration is {"),
    "no section": (lambda: config_dict.ConfigDict(), "algorithm: missing"),
    "a missing key": (lambda: without("batch", "rows"), "batch.rows: missing"),
    "an unknown key": (
        lambda: with_key("batch", "row"),
        "batch.row: unknown key; did you mean batch.rows?",
    ),
    "a text for a number": (lambda: retyped("batch", "rows", "two"), "batch.rows='two'"),
    "a number for a text": (lambda: retyped("algorithm", "name", 3), "algorithm.name=3"),
    "a fraction for a count": (lambda: retyped("batch", "rows", 2.0), "batch.rows=2.0"),
    "a truth value for a count": (lambda: retyped("batch", "rows", True), "batch.rows=True"),
    "None where it means nothing": (lambda: retyped("batch", "rows", None), "batch.rows=None"),
    "an optional key of another type": (
        lambda: retyped("budget", "updates", "ten"),
        "budget.updates='ten': wrong type, expected an integer or None",
    ),
    "an empty path": (lambda: retyped("environment", "data", ""), "environment.data=''"),
}


@pytest.mark.parametrize("case", MISSHAPEN)
def test_a_config_of_another_shape_is_refused_in_one_line(case):
    make, start = MISSHAPEN[case]
    with pytest.raises(config_lib.ConfigError) as raised:
        resolve(make())
    assert str(raised.value).startswith(start)
    assert "\n" not in str(raised.value)


def test_a_whole_number_may_stand_for_a_fraction():
    assert resolve(retyped("algorithm", "gamma", 1)).algorithm.gamma == 1


@pytest.mark.parametrize(
    ("row_length", "buckets"),
    [(2048, (1024, 1536, 1792)), (384, (256,)), (128, ()), (16_384, (8192, 12_288, 14_336))],
)
def test_rows_are_half_three_quarters_or_seven_eighths_as_long_where_nothing_is_said(
    row_length, buckets
):
    config = resolve(make_config(policy__context=128, batch__row_length=row_length))
    assert config.batch.row_buckets == buckets
    assert resolve(make_config(batch__row_buckets=())).batch.row_buckets == ()


def test_a_path_may_be_as_long_as_the_context_where_nothing_is_said():
    assert resolve(make_config(policy__context=640)).batch.path_length == 640


def test_rows_of_cloning_divide_over_the_devices():
    with pytest.raises(config_lib.ConfigError, match=r"warmstart\.rows=4: expected a multiple"):
        resolve(make_config(cpu_devices=3), mode="warmstart")


def test_where_there_may_be_an_accelerator_its_devices_decide(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    config = resolve(make_config(mesh__data=2))
    config_lib.check_mesh(config, "train", devices=2)
    with pytest.raises(config_lib.ConfigError, match="number of devices, 3"):
        config_lib.check_mesh(config, "train", devices=3)


def test_an_unknown_mode_is_refused():
    with pytest.raises(config_lib.ConfigError, match="expected one of train, eval, warmstart"):
        resolve(make_config(), mode="serve")


CLONING = {
    "warmstart.data": ("/no/chats.jsonl", "no such file"),
    "warmstart.row_length": (500, "expected a multiple of 128"),
    "rollout.temperature": (0.0, "expected a number greater than 0"),
}


@pytest.mark.parametrize("key", CLONING)
def test_cloning_that_cannot_work_is_refused(key):
    value, reason = CLONING[key]
    with pytest.raises(config_lib.ConfigError, match=f"{key}={value!r}: .*{reason}"):
        resolve(make_config(**{key.replace(".", "__"): value}), mode="warmstart")


def test_the_presets_that_are_accepted_are_those_there_are():
    assert list(config_checks.PRESETS) == list(presets.PRESETS)


def test_evaluation_may_be_greedy_and_needs_no_budget():
    config = make_config(budget__updates=None, eval__temperature=0.0)
    resolve(config, mode="eval")
