"""The configuration: what composes and trains, what is refused and in which words, and which value wins."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from dataclasses import Field
from typing import Any

import pytest
from conftest import demonstrations
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ValidationError

import rlkit.envs
import rlkit.saved
from rlkit.build import ConfigError, to_config
from rlkit.conf.schema import ALGO_SCHEMAS, Config, allowed, choice, keys, options, shown, type_in_words
from rlkit.overrides import for_hydra, literal
from rlkit.train import compose, help_page, main, prepare
from rlkit.train import run as train_run

ALGOS = tuple(ALGO_SCHEMAS)
TUNED = [name for name in options("tuned") if name != "none"]
SMALL = {
    "ppo": ["algo.num_steps=32", "algo.num_epochs=1"],
    "grpo": ["algo.max_episode_steps=40", "algo.num_epochs=1"],
}  # what is tried without tuned settings need not take long
QUICK = {"env": "CartPole", "num_envs": 8, "eval.every": 0, "policy.hidden": [4], "algo.num_epochs": 1}
OPEN_ID = ["env.id=CartPole-v1"]  # what a choice of env that leaves the id open is tried with
ISSUE_KEYS = re.findall(
    r"\S+",
    """
    seed members total_steps num_envs device stop_when_solved
    env.id env.backend env.normalize_observation env.normalize_reward
    eval.every eval.episodes checkpoint.every log.every
    algo.num_steps algo.group_size algo.max_episode_steps
    algo.num_epochs algo.num_minibatches algo.learning_rate algo.gamma algo.gae_lambda algo.clip algo.clip_high
    algo.entropy_coef algo.value_coef algo.value_clip algo.normalize_advantage algo.max_grad_norm algo.target_kl
    algo.advantage algo.aggregation algo.adam_betas
    algo.schedule.learning_rate.name algo.schedule.learning_rate.final algo.schedule.learning_rate.rate
    algo.schedule.clip.name algo.schedule.clip.final algo.schedule.clip.rate algo.schedule.clip.target
    algo.schedule.clip.floor algo.schedule.entropy_coef.name algo.schedule.entropy_coef.final
    policy.hidden policy.critic_hidden policy.activation policy.shared_trunk policy.log_std_init policy.squash
    policy.layer_norm policy.dropout policy.value_normalization
    """,
)


def every_key() -> dict[str, tuple[str, Field[Any]]]:
    """Key -> (an algorithm that has it, its field), of all algorithms."""
    return {name: (algo, f) for algo in ALGOS for name, f, _ in keys(Config(algo=ALGO_SCHEMAS[algo]()))}


KEYS = every_key()
LEAST = {name for name in KEYS if name not in ("env.name", "algo.name")}  # those two are set by the choice of a group


@pytest.fixture(scope="module")
def composed() -> dict[str, DictConfig]:
    return {algo: compose([f"algo={algo}", "tuned=none"])[0] for algo in ALGOS}


@pytest.fixture
def no_environment(monkeypatch):
    """Fail if anything makes an environment."""

    def make(*args: object, **kwargs: object) -> None:
        pytest.fail("an environment was made")

    monkeypatch.setattr(rlkit.envs, "make", make)


def with_value(composed: dict[str, DictConfig], name: str, value: Any) -> DictConfig:
    config = composed[KEYS[name][0]].copy()
    OmegaConf.update(config, name, value, merge=False)
    return config


# --- what trains ---------------------------------------------------------------------------------------------------


def selections() -> list[list[str]]:
    """Every choice of every group, in every combination that an experiment does not fix."""
    stabilizers = ["stabilizer=[]", *(f"stabilizer=[{name}]" for name in options("stabilizer"))]
    pairs = [
        [f"env={env}", f"algo={algo}", *tuned, stabilizer, *([] if "id" in choice("env", env) else OPEN_ID)]
        for env in options("env")
        for algo in options("algo")
        for tuned in ([], ["tuned=none", *SMALL[algo]])
        for stabilizer in stabilizers
        if not (algo == "grpo" and stabilizer == "stabilizer=[value_l2]")  # which has no critic
        if tuned or f"{env}_{algo}" in TUNED  # where there are none, both are the same
    ]
    return pairs + [[f"experiment={name}", "members=2"] for name in options("experiment")]


def demanded(overrides: list[str]) -> list[str]:
    """What the choices leave open and a stabiliser must know."""
    name = next((o[len("stabilizer=[") : -1] for o in overrides if o.startswith("stabilizer=[")), "")
    if name not in ("cloning", "warm_up"):
        return []
    env = compose(overrides)[0].env
    short = ["stabilizer.warm_up.share=0.001"] if name == "warm_up" else []
    return [f"stabilizer.{name}.demonstrations={demonstrations(env.id, env.backend)}", *short]


@pytest.mark.parametrize("overrides", selections(), ids=" ".join)
def test_every_choice_composes_and_trains_for_two_updates(overrides):
    prepared = prepare(compose([*overrides, *demanded(overrides)])[0])
    try:
        prepared.learner.begin()
        prepared.learner.iterate()
        prepared.learner.iterate()
    finally:
        prepared.close()
    assert (prepared.learner.optimizer.t > 0).all()
    assert all(p.isfinite().all() for p in prepared.learner.policy.parameters())


@pytest.mark.parametrize("name", TUNED)
def test_tuned_settings_of_a_pair_come_by_themselves(name):
    env, algo = name.rsplit("_", 1)
    assert env in options("env")
    assert algo in options("algo")
    settings = leaves(OmegaConf.create(choice("tuned", name)))
    assert settings
    tuned, _ = compose([f"env={env}", f"algo={algo}"])
    plain, _ = compose([f"env={env}", f"algo={algo}", "tuned=none"])
    defaults = Config(algo=ALGO_SCHEMAS[algo]())
    assert {key: OmegaConf.select(tuned, key) for key in settings} == settings
    assert plain.num_envs == defaults.num_envs
    assert plain.algo.learning_rate == defaults.algo.learning_rate
    assert plain != tuned


@pytest.mark.parametrize("name", TUNED)
def test_the_command_line_has_the_last_word(name):
    env, algo = name.rsplit("_", 1)
    pair = [f"env={env}", f"algo={algo}"]
    given = {"algo.learning_rate": 0.125, "total_steps": 4096, "algo.schedule.clip.name": "constant"}
    config, _ = compose([*(f"{key}={value}" for key, value in given.items()), *pair])
    assert {key: OmegaConf.select(config, key) for key in given} == given


def test_tuned_settings_of_another_pair_are_a_choice_too():
    config, _ = compose(["env=gym", "env.id=CartPole-v1", "algo=ppo", "tuned=CartPole_ppo"])
    assert config.algo.num_epochs == choice("tuned", "CartPole_ppo")["algo"]["num_epochs"]


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in node:
        inner = node[name]
        found |= leaves(inner, f"{prefix}{name}.") if isinstance(inner, DictConfig) else {f"{prefix}{name}": inner}
    return found


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ISSUE_KEYS)
def test_the_promised_keys_exist(name):
    assert name in KEYS


def unwrapped(page: str) -> list[str]:
    """The lines of a help page, those that go on in the next one put together."""
    assert max(map(len, page.splitlines())) <= 100
    return re.sub(r"\n {15,}", " ", page).splitlines()


def test_help_has_every_key_with_default_and_range():
    page = unwrapped(help_page())
    for name in sorted(LEAST):
        _, f = KEYS[name]
        [line] = [line for line in page if line.startswith(f"  {name}=")]
        assert f.metadata["doc"] in line
        assert allowed(f.metadata["bounds"]) in line
        words = allowed(f.metadata["bounds"]) if f.type == "str" else type_in_words(f).removeprefix("a ")
        assert f"({words or 'word'}" in line
    assert any(re.match(r"  algo.target_kl=null +\(number or null, > 0\): end a member", line) for line in page)
    assert any(re.match(r"  policy.squash=false +\(true or false\): continuous", line) for line in page)
    assert not any(re.search(r"=(None|True|False)\b", line) for line in page)


KINDS = {"int": "whole number", "float": "number", "bool": "true or false", "str": "word"}
ENTRIES = [
    (name, key)
    for name in options("stabilizer")
    if name != "recommended"
    for key in choice("stabilizer", name)[name]
    if key != "_target_"
]


@pytest.mark.parametrize(("name", "key"), ENTRIES)
def test_help_has_every_key_of_a_stabiliser_as_its_class_takes_it(name, key):
    entry = choice("stabilizer", name)[name]
    module, _, kind = entry["_target_"].rpartition(".")
    target = getattr(importlib.import_module(module), kind)
    parameter = inspect.signature(target).parameters[key]
    assert parameter.default == entry[key]
    bounds = target.bounds.get(key, {})
    plain, _, null = parameter.annotation.partition(" | ")
    words = KINDS[plain] + " or null" * bool(null)
    words = allowed(bounds) if "choices" in bounds else ", ".join(filter(None, (words, allowed(bounds))))
    [line] = [
        line for line in unwrapped(help_page()) if line.startswith(f"  stabilizer.{name}.{key}={shown(entry[key])} ")
    ]
    assert re.fullmatch(rf"\S+ +{re.escape(f'({words}): ')}\w.+", line.strip())


def test_help_of_a_preset_says_what_it_is_made_of():
    page = help_page()
    assert "stabilizer=recommended, which is [old_kl,rollback] with:" in page
    assert page.count("stabilizer.rollback.end_drop=0.01") == 1


def test_help_has_every_choice_of_every_group():
    page = unwrapped(help_page())
    for group in ("env", "algo", "stabilizer", "tuned", "experiment"):
        [line] = [line for line in page if line.split()[:1] == [group]]
        assert all(name in line for name in options(group))


@pytest.mark.parametrize("name", sorted(LEAST))
def test_every_key_is_typed(composed, name):
    wrong: Any = ["what", "ever"] if KEYS[name][1].type == "str" else "whatever"
    with pytest.raises(ValidationError):
        with_value(composed, name, wrong)


# --- refused: one sentence with the key, the value and what is allowed, before any environment --------------------


def beyond(bounds: dict[str, Any]) -> list[Any]:
    """Values just outside of bounds."""
    outside: dict[str, Any] = {
        "gt": lambda b: b,
        "ge": lambda b: b - 1,
        "lt": lambda b: b,
        "le": lambda b: b + 1,
        "choices": lambda b: "nonsense",
    }
    return [outside[sign](bound) for sign, bound in bounds.items()]


BEYOND = [(name, v) for name in sorted(LEAST) for v in beyond(KEYS[name][1].metadata["bounds"])]
NUMBERS = [name for name in sorted(LEAST) if str(KEYS[name][1].type).startswith("float")]


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("name", "value"), BEYOND)
def test_a_value_out_of_range_is_refused(composed, name, value):
    with pytest.raises(ConfigError) as error:
        prepare(with_value(composed, name, value))
    [sentence] = [line for line in str(error.value).split("\n") if line.startswith(f"{name} is ")]
    shown = sentence.removeprefix(f"{name} is ").partition(";")[0]
    assert shown == value if isinstance(value, str) else float(shown) == value
    assert sentence.endswith(f"it must be {allowed(KEYS[name][1].metadata['bounds'])}")


def test_the_bounds_are_not_empty():
    assert len(BEYOND) > 30
    assert {"algo.clip", "algo.group_size", "members", "num_envs", "env.backend"} <= {name for name, _ in BEYOND}


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("name", "value"), [*((name, math.nan) for name in NUMBERS), ("algo.clip", math.inf)])
def test_what_is_not_a_finite_number_is_refused(composed, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be a finite number"):
        prepare(with_value(composed, name, value))


WRONG_TYPES = [
    ("members=three", "members is three; it must be a whole number"),
    ("total_steps=1.5", "total_steps is 1.5; it must be a whole number"),
    ("total_steps=inf", "total_steps is inf; it must be a whole number"),
    ("members=true", "members is true; it must be a whole number"),
    ("seed=null", "seed is null; it must be a whole number"),
    ("algo.gamma=high", "algo.gamma is high; it must be a number"),
    ("algo.clip=abc", "algo.clip is abc; it must be a number or null"),
    ("stop_when_solved=maybe", "stop_when_solved is maybe; it must be true or false"),
    ("env.backend=[sync]", "env.backend is [sync]; it must be a word"),
    ("policy.hidden=64", "policy.hidden is 64; it must be a list of whole numbers"),
    ("policy.hidden=[64,x]", "policy.hidden is [64,x]; it must be a list of whole numbers"),
    ("policy.critic_hidden=[a]", "policy.critic_hidden is [a]; it must be a list of whole numbers or null"),
    ("algo.adam_betas=[a,b]", "algo.adam_betas is [a,b]; it must be a list of numbers"),
    ("algo.schedule.clip=linear", "algo.schedule.clip is linear; it is not one value but holds keys: "),
]


@pytest.mark.parametrize(("override", "sentence"), WRONG_TYPES)
def test_a_value_of_another_type_is_refused(override, sentence):
    with pytest.raises(ConfigError) as error:
        compose([override])
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


WHOLE = [name for name, (_, f) in sorted(KEYS.items()) if f.type in ("int", "int | None")]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_may_be_written_as_a_float(name):
    algo = [f"algo={KEYS[name][0]}", "tuned=none"]
    written, plain = compose([*algo, f"{name}=6.4e1"])[0], compose([*algo, f"{name}=64"])[0]
    assert type(OmegaConf.select(written, name)) is int
    assert written == plain  # so that a report takes both for the same settings


def test_a_whole_number_may_be_written_as_a_float_in_a_file_and_in_python(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntotal_steps: 1e3\nmembers: 2e0\n")
    monkeypatch.setattr("sys.argv", ["train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job"])
    assert main() == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert (shown.total_steps, shown.members) == (1000, 2) and type(shown.total_steps) is int
    run = train_run(folder=tmp_path / "run", algo="ppo", tuned="none", total_steps=1.024e3, stop_at=1e0, **QUICK)
    assert OmegaConf.load(run.folder / ".hydra" / "config.yaml").total_steps == 1024
    resumed = train_run(resume=run.folder, total_steps=2.048e3)
    assert resumed.summary["env_steps"] == [2048]


def test_a_whole_number_of_a_stabiliser_or_an_estimator_may_be_written_as_a_float():
    steps = ["algo=ppo", "tuned=none", "algo.advantage=n_step"]
    given = ["stabilizer=rollback", "stabilizer.rollback.patience=3e0", "algo.advantage_args={n: 4e0}"]
    prepared = prepare(compose([*steps, *given])[0])
    prepared.close()
    assert type(prepared.learner.keepers["rollback"].patience) is int
    with pytest.raises(ConfigError, match=r"stabilizer.rollback.patience is 1.5; it must be of type int"):
        prepare(compose([*steps, "stabilizer=rollback", "stabilizer.rollback.patience=1.5"])[0])
    with pytest.raises(ConfigError, match=r"stabilizer.rollback.end_drop is 'all'; it must be of type float"):
        prepare(compose([*steps, "stabilizer=rollback", "stabilizer.rollback.end_drop=all"])[0])


FILES = [
    ("algo: {gamma: high}", "algo.gamma is high; it must be a number"),
    ("algo: {clipp: 1}", "algo.clipp is not a key of this configuration; did you mean algo.clip?"),
    ("total_steps: 1.5", "total_steps is 1.5; it must be a whole number"),
    ("xyzzy: 1", "xyzzy is not a key of this configuration; --help lists the keys"),
    ("env: {backend: [1]}", "env.backend: Cannot convert 'ListConfig' to string: '[1]'"),
]


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_a_fault_in_a_file_of_settings_names_the_file(text, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train", "--config-dir", str(tmp_path), "experiment=mine", "algo=ppo"])
    assert main() == 2
    assert capsys.readouterr().err == f"rlkit: experiment/mine.yaml: {sentence}\n"


# --- what is written shorter than Hydra has it ---------------------------------------------------------------------


@pytest.mark.parametrize("nothing", ["none", "null", "", "[]"])
def test_no_stabiliser_may_be_written_in_words(nothing):
    config, _ = compose([f"stabilizer={nothing}", "experiment=report_seeds"])
    assert config == compose(["experiment=report_seeds"])[0]
    assert config.stabilizer == {}


def test_in_a_sweep_no_stabiliser_may_be_one_of_several():
    assert for_hydra(["stabilizer=none,[ref_kl,rollback],", "stabilizer=null,old_kl", "seed=none"]) == [
        "stabilizer=[],[ref_kl,rollback],[]",
        "stabilizer=[],old_kl",
        "seed=none",
    ]


def test_arguments_of_the_environment_may_be_given_together(tmp_path, monkeypatch):
    lake = ["env=gym", "env.id=FrozenLake-v1", "algo=ppo"]
    for text in ("env.kwargs={map_name:8x8}", "env.kwargs={map_name: 8x8}", "+env.kwargs={map_name:8x8}"):
        config, _ = compose([*lake, text])
        assert config.env.kwargs == {"map_name": "8x8"}
        assert to_config(config).env.kwargs == {"map_name": "8x8"}
    given = [*lake, *SMALL["ppo"], "total_steps=256", "eval.every=0", "env.kwargs={map_name: 8x8}"]
    monkeypatch.setattr("sys.argv", ["train", *given, f"hydra.run.dir={tmp_path / 'command'}"])
    assert main() == 0
    settings = {"env": "gym", "env__id": "FrozenLake-v1", "algo": "ppo", "total_steps": 256, "eval__every": 0}
    quick = dict(text.split("=") for text in SMALL["ppo"])
    run = train_run(folder=tmp_path / "python", env__kwargs={"map_name": "8x8"}, **settings, **quick)
    states = [rlkit.saved.SavedRun.open(folder).state for folder in (tmp_path / "command", run.folder)]
    assert states[0]["actor.weights.0"].shape[1] == 64  # squares of the larger map
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


def test_text_among_the_arguments_of_an_environment_stays_text():
    given = {"map_name": "8x8", "number": "4", "nothing": "null", "rows": ["01", "10"], "scale": 1.5, "none": None}
    config, _ = compose([f"env.kwargs={literal(given)}"])
    assert config.env.kwargs == given


def test_every_type_has_words():
    assert all(type_in_words(f) for _, f in KEYS.values())


NAMES = [
    (["env=CartPol"], "env is 'CartPol'", "did you mean CartPole?"),
    (["env=cartpole"], "env is 'cartpole'", "did you mean CartPole?"),
    (["env=null"], "env is 'null'", "must be one of "),
    (["algo=pp0"], "algo is 'pp0'", "did you mean ppo?"),
    (["algo=GRPO"], "algo is 'GRPO'", "did you mean grpo?"),
    (["stabilizer=[ref_k1]"], "stabilizer is 'ref_k1'", "did you mean ref_kl?"),
    (["tuned=CartPole_pp"], "tuned is 'CartPole_pp'", "did you mean CartPole_ppo?"),
    (["tuned=off"], "tuned is 'off'", "none"),
    (["experiment=nonesuch"], "experiment is 'nonesuch'", "it must be"),
    (["algo.clipp=0.1"], "algo.clipp is not a key", "did you mean algo.clip?"),
    (["gamma=0.9"], "gamma is not a key", "did you mean algo.gamma?"),
    (["lr=0.1"], "lr is not a key", "--help"),
    (["+algo.clipp=0.1"], "algo.clipp is not a key", "did you mean algo.clip?"),
    (["++xyzzy=0.1"], "xyzzy is not a key", "--help"),
    (["algo=grpo", "algo.num_steps=3"], "algo.num_steps", "a key of algo=ppo alone"),
    (["algo=ppo", "algo.group_size=3"], "algo.group_size", "a key of algo=grpo alone"),
    (["stabilizer.ref_kl.coef=1"], "stabilizer.ref_kl.coef", "add 'stabilizer=[ref_kl]'"),
    (["stabilizer=[ref_kl]", "stabilizer.ref_kl.coeff=1"], "stabilizer.ref_kl.coeff", "did you mean coef?"),
    (["env.kwargs.gravity=1"], "env.kwargs.gravity", "+env.kwargs.gravity="),
    (["seed"], "seed cannot be read", "key=value"),
    (["algo.clip=(1"], "algo.clip=(1 cannot be read", "quote"),
    (["algo=ppo,grpo"], "algo is ppo,grpo", "add -m"),
    (["--members=3"], "--members=3 is not an option", "without dashes"),
    (["env=gym"], "env.id must be given", "env=gym env.id="),
    (["env=gym", "env.id=CartPol-v1"], "env.id=CartPol-v1", "CartPole-v1"),
    (["env=gym", "env.id=nomodule:X-v0"], "env.id=nomodule:X-v0", "nomodule cannot be imported"),
    (["env=gym", "env.id=FrozenLake-v1", "env.backend=native"], "env.backend is native", "sync or async"),
    (["env.id=Acrobot-v1", "env.backend=sync"], "env.id is Acrobot-v1 and env is CartPole", "env=gym env.id=Acrobot"),
    (["algo.advantage=outcom"], "algo.advantage is 'outcom'", "did you mean outcome?"),
    (["algo.advantage=nomodule:f"], "algo.advantage is 'nomodule:f'", "cannot be imported"),
    (["algo.advantage=.:f"], "algo.advantage is '.:f'", "not the name of a module"),
    (["algo.advantage=os:getcwd"], "algo.advantage is 'os:getcwd'", "(rollout, gamma, gae_lambda)"),
    (["stabilizer=[none]"], "stabilizer is 'none'", "must be one of "),
    (["stabilizer=[ref_kl,none,rollback]"], "stabilizer is 'none'", "must be one of "),
    (["env.kwargs=null"], "env.kwargs is null", "keys and values"),
    (["stabilizer={a: 1}"], "stabilizer is '{a: 1}'", "must be one of "),
    (["algo=[ppo,grpo]"], "algo is '[ppo,grpo]'", "must be one of "),
    (["env=1"], "env is '1'", "must be one of "),
    (["~env"], "~env leaves no env", "must be one of "),
    (["seed=${nothing}"], "seed: ", "'nothing' not found"),
    (["algo=grpo", "algo.name=ppo"], "algo.name is ppo", "write algo=ppo"),
]
AT_ODDS = [
    (["num_envs=12"], "num_envs is 12", "multiple of algo.group_size, which is 8"),
    (["algo.num_minibatches=17"], "algo.num_minibatches is 17", "<= num_envs, which is 16"),
    (["total_steps=15"], "total_steps is 15", ">= 16"),
    (["algo=ppo", "total_steps=255"], "total_steps is 255", ">= 256"),
    (["algo=ppo", "algo.num_minibatches=257"], "algo.num_minibatches is 257", "<= 256"),
    (["algo=ppo", "algo.num_minibatches=200"], "algo.num_minibatches is 200", "<= 128"),
    (["members=0"], "members is 0", ">= 1"),
    (["algo.advantage=gae"], "algo.advantage is gae", "needs a critic"),
    (["algo=ppo", "algo.advantage=outcome"], "algo.advantage is outcome", "needs groups"),
    (["algo.adam_betas=[0.9]"], "algo.adam_betas is [0.9]", "two numbers"),
    (["algo.adam_betas=[0.9,1.0]"], "algo.adam_betas is [0.9, 1.0]", "< 1"),
    (["policy.hidden=[[4]]"], "policy.hidden is [[4]]", "a list of whole numbers"),
    (["algo.learning_rate=1e39"], "algo.learning_rate is 1e+39", "float32 > 0"),
    (["total_steps=9223372036854775808"], "total_steps is 9223372036854775808", "64 bits >= 1"),
    (["algo.adam_betas=[nan,0.9]"], "algo.adam_betas is [nan, 0.9]", "< 1"),
    (["policy.hidden=[64,0]"], "policy.hidden is [64, 0]", ">= 1"),
    (["policy.hidden=[]", "policy.shared_trunk=true"], "policy.shared_trunk", "at least one layer"),
    (["policy.hidden=[]", "policy.dropout=0.1"], "policy.dropout is 0.1", "must be 0"),
    (["policy.value_normalization=popart"], "policy.value_normalization is popart", "no critic, it must be none"),
    (["algo.clip=null", "algo.schedule.clip.name=linear"], "algo.clip is null", "constant"),
    (
        ["algo.schedule.learning_rate.name=kl_driven"],
        "algo.schedule.learning_rate.name is kl_driven",
        "constant, linear, exponential, kl_adaptive",
    ),
    (["algo.schedule.clip.final=-1"], "algo.schedule.clip.final is -1", ">= 0"),
    (["stop_when_solved=true", "eval.every=0"], "eval.every is 0", "stop_when_solved"),
    (["stop_when_solved=true", "env=gym", "env.id=Pendulum-v1"], "stop_when_solved", "no reward threshold"),
    (["device=cuda"], "device is cuda", "it must be cpu"),
]


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("overrides", "subject", "remedy"), NAMES + AT_ODDS)
def test_what_cannot_run_is_one_sentence(overrides, subject, remedy):
    with pytest.raises(ConfigError) as error:
        prepare(compose(overrides)[0])
    [sentence] = str(error.value).split("\n")
    assert subject in sentence
    assert remedy in sentence
    assert len(sentence) < 350


def test_every_fault_has_a_line_of_its_own():
    with pytest.raises(ConfigError) as error:
        to_config(compose(["members=0", "seed=-1", "algo.clip=0"])[0])
    assert [line.split()[0] for line in str(error.value).split("\n")] == ["algo.clip", "seed", "members"]


def test_a_grpo_environment_without_a_time_limit_needs_one(endless):
    with pytest.raises(ConfigError, match=r"has no time limit.* algo\.max_episode_steps"):
        to_config(compose(["env=gym", f"env.id={endless}", "algo=grpo"])[0])
    to_config(compose(["env=gym", f"env.id={endless}", "algo=grpo", "algo.max_episode_steps=5"])[0])
    to_config(compose(["env=gym", f"env.id={endless}", "algo=ppo"])[0])


@pytest.fixture
def endless():
    import gymnasium

    gymnasium.register("Unlimited-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    return "Unlimited-v0"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stabilizer=[ref_kl]", "stabilizer.ref_kl=1"], "stabilizer.ref_kl is 1; it must hold keys and values"),
        (
            ["stabilizer=[ref_kl]", "stabilizer.ref_kl.coef=inf"],
            "stabilizer.ref_kl.coef is inf; it must be a finite number",
        ),
        (["+env.kwargs.gravity=1"], "env.kwargs is {'gravity': 1}: "),
        (["stabilizer=[ref_kl]", "stabilizer.ref_kl.coef=-1"], "stabilizer.ref_kl.coef is -1"),
        (["stabilizer=[ref_kl]", "stabilizer.ref_kl.coef=much"], "stabilizer.ref_kl.coef is 'much'"),
        (["stabilizer=[ref_kl]", "stabilizer.ref_kl.kind=k4"], "stabilizer.ref_kl.kind is k4"),
        (["stabilizer=[ref_kl]", "+stabilizer.ref_kl.color=1"], "stabilizer.ref_kl has no key color"),
        (["stabilizer=[ref_kl]", "stabilizer.ref_kl._target_=rlkit.nope.X"], "stabilizer.ref_kl._target_"),
        (["+stabilizer.mine.coef=1"], "stabilizer.mine has no _target_"),
    ],
)
def test_what_only_building_finds_is_a_sentence_too(overrides, words):
    config, _ = compose(overrides)
    with pytest.raises(ConfigError) as error:
        prepare(config)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


# --- the same at the doors ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize("argument", ["algo.clip=-1", "env=CartPol", "env=gym", "seed", "--foo", "tuned=x"])
def test_the_command_refuses_with_status_2_and_leaves_no_folder(monkeypatch, capfd, tmp_path, argument):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train", argument])
    assert main() == 2
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("rlkit: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_environment")
def test_python_refuses_in_the_same_words_and_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"algo\.clip is -1\.0; it must be > 0"):
        train_run(folder=tmp_path / "run", algo__clip=-1)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused(monkeypatch, capfd, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"of a run before")
    with pytest.raises(ConfigError, match="already holds a run"):
        train_run(folder=tmp_path)
    monkeypatch.setattr("sys.argv", ["train", f"hydra.run.dir={tmp_path}"])
    assert main() == 2
    assert "already holds a run" in capfd.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        train_run(folder=tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("value", "read"),
    [(None, None), (True, True), (3, 3), (1e-5, 1e-5), ("a b", "a b"), ("it's; x=y,z", "it's; x=y,z"), ("", "")]
    + [([1, "a b"], [1, "a b"]), ({"high": 1, "name": "a, b"}, {"high": 1, "name": "a, b"}), ("back\\'", "back\\'")],
)
def test_python_values_arrive_as_they_are(value, read):
    config, _ = compose([f"+env.kwargs.given={literal(value)}"])
    with open_dict(config):
        assert OmegaConf.to_container(config.env.kwargs)["given"] == read
