"""Exported policies: what onnxruntime and torch compute from the file is what the policy does."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import rlkit
import rlkit.export
from rlkit.build import build_policy, to_config
from rlkit.envs.spaces import ActionSpec
from rlkit.evaluate import Agent
from rlkit.export import METADATA, OBSERVATIONS, TOLERANCE, ExportError, difference, export, main, random_masks
from rlkit.exported import ExportedPolicy
from rlkit.saved import SavedRun
from rlkit.train import compose

SPACES = {
    "discrete": Discrete(3),
    "from -1": Discrete(3, start=-1),
    "several": MultiDiscrete([2, 3], start=[0, 5]),
    "grid": MultiDiscrete([[2, 3], [4, 2]]),
    "bits": MultiBinary(3),
    "bounded": Box(np.float32([-0.4, 0]), np.float32([0.4, 5])),
    "one side": Box(np.array([0, -np.inf, -np.inf]), np.array([np.inf, 1, np.inf]), dtype=np.float64),
    "matrix": Box(-2, 2, (2, 3), np.float32),
}
OBSERVED = {
    "numbers": Box(-np.inf, np.inf, (3,), np.float64),
    "one-hot": Discrete(5),
    "parts": Dict({"a": Box(0, 3, (2,), np.uint8), "b": Tuple((Discrete(2), MultiDiscrete([2, 3])))}),
}


class Walk(gymnasium.Env):
    """Random observations of a space, whatever is done; with masks, what these forbid must not be."""

    def __init__(self, observed="numbers", acts="discrete", masked=False):
        self.observation_space, self.action_space = OBSERVED[observed], SPACES[acts]
        self.masked, self.masks = masked, ()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), self.info()

    def info(self):
        if not self.masked:
            return {}
        sizes = ActionSpec.of(self.action_space).sizes
        self.masks = tuple(np.eye(size, dtype=np.int8)[self.np_random.integers(size)] for size in sizes)
        return {"action_mask": self.masks if len(sizes) > 1 else self.masks[0]}

    def step(self, action):
        assert self.action_space.contains(action), action
        index = np.ravel(action - getattr(self.action_space, "start", 0)) if self.masks else ()
        assert all(mask[k] for mask, k in zip(self.masks, index, strict=True)), action
        return self.observation_space.sample(), 0.0, False, False, self.info()


gymnasium.register("Walk-v0", Walk, max_episode_steps=20)


def saved(tmp_path: Path, *overrides: str, observed: str = "numbers", acts: str = "discrete") -> SavedRun:
    """A run of two members as it would lie on disk, with weights and statistics that are far from where they start."""
    base = ["env=gym", "env.id=Walk-v0", f"+env.kwargs={{observed: {observed}, acts: {acts}}}", "algo=ppo"]
    config = to_config(compose([*base, "members=2", "policy.hidden=[16,8]", *overrides])[0])
    policy, _ = build_policy(config)
    rng = torch.Generator().manual_seed(0)
    state = {name: x + 0.5 * torch.randn(x.shape, generator=rng).to(x) for name, x in policy.state_dict().items()}
    for name in [name for name in state if name.endswith("normalizer.var")]:
        state[name] = state[name].abs() + 0.01
    return SavedRun(tmp_path, "last", config, state, {"eval_return": [1.0, 2.0]})


def outputs(path: Path, obs: np.ndarray, action_mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """What a file gives for observations, and masks if there are any, by the library its ending calls for."""
    given = {"obs": obs} | ({} if action_mask is None else {"action_mask": action_mask})
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        assert [x.name for x in session.get_inputs()] == [*given]
        names = [x.name for x in session.get_outputs()]
        return dict(zip(names, session.run(None, given), strict=True))
    found = torch.export.load(path).module()(*map(torch.from_numpy, given.values()))
    return {name: x.numpy() for name, x in found.items()}  # which a tensor that takes a gradient refuses


def sampled(space: gymnasium.Space[Any]) -> np.ndarray:
    """Flattened observations of a space, float32 [200, D]."""
    space.seed(5)
    return np.stack([gymnasium.spaces.flatten(space, space.sample()) for _ in range(200)]).astype(np.float32)


CASES: list[tuple[dict[str, str], list[str]]] = [
    ({"acts": "from -1", "observed": "one-hot"}, ["env.normalize_observation=true", "policy.activation=relu"]),
    ({"acts": "several", "observed": "parts"}, ["policy.dropout=0.5", "policy.activation=silu"]),
    ({"acts": "bits"}, ["policy.shared_trunk=true", "policy.layer_norm=true"]),
    ({"acts": "bounded"}, ["policy.squash=true", "policy.log_std=state", "env.normalize_observation=true"]),
    ({"acts": "one side"}, ["policy.log_std_init=-0.5", "policy.value_normalization=popart"]),
    ({"acts": "grid"}, ["policy.hidden=[]"]),
    ({"acts": "matrix", "observed": "parts"}, ["policy.squash=true", "policy.layer_norm=true", "policy.dropout=0.2"]),
]
BOTH = [(*case, format) for k, case in enumerate(CASES) for format in ("torch", "onnx") if k < 5 or format == "torch"]


@pytest.mark.parametrize(("spaces", "overrides", "format"), BOTH, ids=[f"{x[0]['acts']}-{x[2]}" for x in BOTH])
def test_a_file_acts_as_the_policy_does(tmp_path, spaces, overrides, format):
    run = saved(tmp_path, *overrides, **spaces)
    path = tmp_path / f"a{rlkit.export.FORMATS[format].ending}"
    assert export(run, 1, path, format) <= TOLERANCE * 10  # numbers above 1 may be further apart
    policy, actions = run.policy(range(2))
    obs = sampled(OBSERVED[spaces.get("observed", "numbers")])
    for rows in (obs, obs[:1]):  # the number of rows is open
        found = outputs(path, rows)
        assert [*found] == (["action", "logits"] if policy.discrete else ["action", "mean", "std"])
        dist = policy.distribution(torch.from_numpy(rows).expand(2, -1, -1))
        params = {name: x[1].detach().numpy() for name, x in dist.params.items()}
        wanted = Agent(policy, actions, Box(-1, 1, (10_000,)), 1).act(rows)
        assert found["action"].dtype == wanted.dtype and found["action"].shape == wanted.shape
        assert all(actions.space.contains(action) for action in found["action"][:20])
        if policy.discrete:
            np.testing.assert_allclose(found["logits"], params["logits"], rtol=1e-5, atol=1e-5)
            assert (found["action"] == wanted).mean() > 0.99 and len(np.unique(wanted, axis=0)) <= 50
        else:
            np.testing.assert_allclose(found["action"], wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found["mean"], params["mean"], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found["std"], np.exp(params["log_std"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["torch", "onnx"])
@pytest.mark.parametrize("acts", ["from -1", "several"])
def test_a_file_of_a_run_with_masks_takes_them_as_the_agent_does(tmp_path, acts, format):
    run = saved(tmp_path, "env.action_mask=true", "+env.kwargs.masked=true", acts=acts)  # it raises at illegal actions
    path = tmp_path / f"a{rlkit.export.FORMATS[format].ending}"
    export(run, 1, path, format)
    policy, actions = run.policy(range(2))
    obs, masks = sampled(OBSERVED["numbers"]), random_masks(policy.sizes, 200)
    found = outputs(path, obs, masks)
    agent = Agent(policy, actions, OBSERVED["numbers"], 1, masked=True)
    wanted = agent.act(obs, action_mask=masks)
    assert (found["action"] == wanted).mean() > 0.99
    assert (wanted != Agent(policy, actions, OBSERVED["numbers"], 1).act(obs)).mean() > 0.2  # and it matters
    heads = np.split(found["logits"], np.cumsum(policy.sizes)[:-1], 1)
    for head, mask in zip(heads, np.split(masks, np.cumsum(policy.sizes)[:-1], 1), strict=True):
        np.testing.assert_allclose(np.exp(head).sum(1), 1.0, rtol=1e-5)
        assert ((head < -5e8) == (mask == 0)).all()
    with pytest.raises(ValueError):
        outputs(path, obs) if format == "torch" else rlkit.export.FORMATS["onnx"].read(path.read_bytes())({"obs": obs})


def test_random_masks_forbid_half_and_leave_each_head_an_action():
    masks = random_masks((2, 3, 1), 1_000)
    assert masks.shape == (1_000, 6) and masks.dtype == np.int8 and set(np.unique(masks)) == {0, 1}
    assert all(head.any(1).all() for head in np.split(masks, [2, 5], 1))
    assert 0.3 < masks[:, 2:5].mean() < 0.8


def test_a_file_that_forgets_masks_differs(tmp_path):
    run = saved(tmp_path, acts="from -1")
    policy, actions = run.policy(range(1))
    obs = sampled(OBSERVED["numbers"])
    given = {"obs": obs, "action_mask": random_masks(policy.sizes, len(obs))}
    module = ExportedPolicy(policy, actions, 0, masked=True)
    right = {name: x.numpy() for name, x in module(*map(torch.from_numpy, given.values())).items()}
    assert difference(right, policy, actions, given) < 1e-5
    bare = {name: x.numpy() for name, x in module(torch.from_numpy(obs)).items()}
    for wrong in (bare, {**right, "action": bare["action"]}, {**right, "logits": right["logits"] + np.float32(1e-3)}):
        with pytest.raises(ExportError, match="differ from the policy's"):
            difference(wrong, policy, actions, given)


def test_a_member_s_numbers_are_computed_by_hand(tmp_path):
    run = saved(tmp_path, "env.normalize_observation=true", "policy.hidden=[16]", acts="from -1")
    export(run, 1, tmp_path / "a.onnx")
    state = {name: x[1].numpy() for name, x in run.state.items()}
    obs = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    x = ((obs - state["normalizer.mean"]) / np.sqrt(state["normalizer.var"] + 1e-8)).clip(-10, 10)
    h = np.tanh(x @ state["actor.weights.0"] + state["actor.biases.0"])
    logits = h @ state["actor.weights.1"] + state["actor.biases.1"]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    found = outputs(tmp_path / "a.onnx", obs)
    np.testing.assert_allclose(found["logits"], log_p, rtol=1e-5, atol=1e-5)
    assert found["action"].tolist() == (log_p.argmax(1) - 1).tolist()


def test_the_difference_that_is_told_is_the_largest(tmp_path):
    run = saved(tmp_path, acts="bounded")
    policy, actions = run.policy(range(1))
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    dist = policy.distribution(torch.from_numpy(obs)[None])
    mean, std = dist.params["mean"][0].detach().numpy(), dist.params["log_std"][0].exp().detach().numpy()
    action = mean.clip([-0.4, 0], [0.4, 5]).astype(np.float32)
    std = std.copy()
    std[4, 1] += 8e-6
    given = {"obs": obs}
    outputs = {"action": action, "mean": mean, "std": std}
    assert difference(outputs, policy, actions, given) == pytest.approx(8e-6, rel=0.1)
    std[4, 1] += 1e-3
    with pytest.raises(ExportError, match="differ from the policy's by up to 1.01e-03, above 1e-05"):
        difference(outputs, policy, actions, given)
    with pytest.raises(ExportError, match=r"shape \(8, 2\) where the policy has \(9, 2\)"):
        difference({**outputs, "action": action[:8]}, policy, actions, given)


def test_an_index_may_be_that_of_an_equal_choice_and_of_no_other(tmp_path):
    run = saved(tmp_path, "policy.hidden=[]", acts="from -1")
    state = {name: torch.zeros_like(x) for name, x in run.state.items()}
    state["actor.biases.0"] = torch.tensor([[[1.0, 1.0, 0.0]]] * 2)
    policy, actions = SavedRun(run.folder, "last", run.config, state, {}).policy(range(1))
    given = {"obs": np.zeros((2, 3), np.float32)}
    logits = policy.distribution(torch.from_numpy(given["obs"])[None]).params["logits"][0].detach().numpy()
    assert difference({"action": np.array([-1, 0]), "logits": logits}, policy, actions, given) <= 1e-6
    with pytest.raises(ExportError, match="differ from the policy's by up to 1.00e"):
        difference({"action": np.array([-1, 1]), "logits": logits}, policy, actions, given)


def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch, capsys):
    names = ("action", "mean", "std")
    wrong = rlkit.export.Format(
        ".onnx", (), lambda *_: b"x", lambda _: lambda given: dict.fromkeys(names, np.zeros(len(given["obs"])))
    )
    monkeypatch.setitem(rlkit.export.FORMATS, "onnx", wrong)
    run = rlkit.run(folder=tmp_path / "run", **TINY)
    before = sorted(run.folder.iterdir())
    assert main([str(run.folder)]) == 1
    assert "policy.onnx was not written: an output has shape" in capsys.readouterr().err
    assert sorted(run.folder.iterdir()) == before


# --- the command ---------------------------------------------------------------------------------------------------

TINY = {"env": "Pendulum", "algo": "ppo", "members": 2, "total_steps": 512, "num_envs": 2, "policy.hidden": [8]}
TINY |= {"tuned": "none", "eval.every": 256, "eval.episodes": 1, "log.every": 0, "env.normalize_observation": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return rlkit.run(folder=tmp_path_factory.mktemp("runs") / "run", **TINY)


def test_the_command_writes_the_best_member_with_what_it_is(trained, capsys, monkeypatch):
    import onnx

    # a logger of torch may hold the standard error that another test captured, and complain that it is closed
    monkeypatch.setattr(logging, "raiseExceptions", False)

    assert main([str(trained.folder)]) == 0
    best = int(np.argmax(trained.eval_return))
    said = capsys.readouterr()
    assert f"policy.onnx: member {best} (seed {best}), last checkpoint at 512 steps; within " in said.out
    assert said.out.endswith(f" of the policy on {OBSERVATIONS:,} observations\n")
    assert said.err == ""
    model = onnx.load(trained.folder / "policy.onnx")
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert about["environment"] == "Pendulum-v1" and about["rlkit_version"] == rlkit.__version__
    assert about["member"] == about["seed"] == str(best) and about["checkpoint"] == "last"
    assert about["action_space"] == "Box(-2.0, 2.0, (1,), float32)" and about["env_steps"] == "512"
    assert json.loads(about["inputs"]) == {"obs": "float32 [batch, 3], flattened"}
    form = "float32 [batch, 1]"
    assert json.loads(about["outputs"]) == {"action": form, "mean": form, "std": form}
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    found = outputs(trained.folder / "policy.onnx", obs)
    np.testing.assert_allclose(found["action"], rlkit.load(trained.folder).act(obs), atol=1e-5)


def test_the_command_writes_a_torch_program_that_runs_without_rlkit(trained, tmp_path, capsys):
    file = tmp_path / "new" / "a.pt2"
    options = ["--format", "torch", "--member", "1", "--checkpoint", "best", "--output", str(file)]
    assert main([str(trained.folder), *options]) == 0
    extra = {METADATA: ""}
    torch.export.load(file, extra_files=extra)
    about = json.loads(extra[METADATA])
    assert about["member"] == 1 and about["checkpoint"] == "best" and about["environment"] == "Pendulum-v1"
    code = (
        "import sys, torch; m = torch.export.load(sys.argv[1]).module(); print(m(torch.ones(2, 3))['action'].tolist());"
        "assert not [name for name in sys.modules if name.startswith('rlkit')]"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    agent = rlkit.load(trained.folder, member=1, checkpoint="best")
    np.testing.assert_allclose(json.loads(done.stdout), agent.act(np.ones((2, 3))), atol=1e-5)


def metadata(file: Path) -> dict[str, Any]:
    extra = {METADATA: ""}
    torch.export.load(file, extra_files=extra)
    return dict(json.loads(extra[METADATA]))


def test_a_file_says_with_which_steps_it_was_made_and_a_resumed_run_that_it_is_old(tmp_path, capsys):
    settings = {**TINY, "members": 1, "eval.every": 128}
    run = rlkit.run(folder=tmp_path / "run", **settings, stop_at=256)
    command = [str(run.folder), "--format", "torch"]
    assert main(command) == 0
    assert "last checkpoint at 256 steps; " in capsys.readouterr().out
    old = run.folder / "policy.pt2"
    assert metadata(old)["env_steps"] == 256
    rlkit.run(resume=run.folder, show="plain")
    wanted = f"policy.pt2 stays the policy that was exported before; python -m rlkit.export {run.folder} renews it"
    assert capsys.readouterr().out.count(wanted) == 1
    assert metadata(old)["env_steps"] == 256
    assert main(command) == 0
    assert metadata(old)["env_steps"] == 512

    best = SavedRun.open(run.folder, "best")
    curve = [line.split(",") for line in (run.folder / "metrics.csv").read_text().splitlines()]
    seen = {float(value): int(step) for step, _, name, value in curve if name == "eval/return"}
    assert best.steps(0) in (256, 512) and best.steps(0) == seen[max(seen)]
    assert main([*command, "--checkpoint", "best"]) == 0
    assert metadata(old)["env_steps"] == best.steps(0) and metadata(old)["checkpoint"] == "best"
    assert f"best checkpoint at {best.steps(0)} steps" in capsys.readouterr().out


def test_the_command_says_that_a_file_takes_masks(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path, "env.action_mask=true", "+env.kwargs.masked=true", acts="from -1")
    monkeypatch.setattr(SavedRun, "open", lambda *_: run)
    assert main([str(tmp_path), "--format", "torch"]) == 0
    assert "1,000 observations with random action masks, which it takes as action_mask\n" in capsys.readouterr().out
    about = metadata(tmp_path / "policy.pt2")
    assert about["inputs"] == {
        "obs": "float32 [batch, 3], flattened",
        "action_mask": "int8 [batch, 3], 1 where legal",
    }
    assert about["outputs"] == {"action": "int64 [batch]", "logits": "float32 [batch, 3]"}


PAGE = (Path(__file__).parent.parent / "docs" / "export.md").read_text()
EXAMPLES = dict(re.findall(r"^## (With [^\n]*)\n\n```python\n(.*?)```", PAGE, re.M | re.S))
RUNS = {
    "With ONNX Runtime": ("onnx", ["env=CartPole"]),
    "With torch": ("torch", ["env=CartPole"]),
    "With action masks": ("onnx", ["env=gym", "env.id=Taxi-v4", "env.action_mask=true"]),
}


def test_every_example_of_the_page_is_tried():
    assert EXAMPLES.keys() == RUNS.keys() and PAGE.count("```python") == len(RUNS)


@pytest.mark.parametrize("title", RUNS)
def test_an_example_of_the_page_plays_as_the_agent_does(title, tmp_path, monkeypatch, capsys):
    format, overrides = RUNS[title]
    config = to_config(compose([*overrides, "algo=ppo", "policy.hidden=[8]"])[0])
    policy, actions = build_policy(config)
    policy.requires_grad_(False).actor.weights[-1].mul_(100)  # an untrained policy hardly prefers an action
    run = SavedRun(tmp_path, "last", config, policy.state_dict(), {}, [7])
    export(run, 0, tmp_path / f"policy{rlkit.export.FORMATS[format].ending}", format)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(EXAMPLES[title], names)

    env = gymnasium.make(config.env.id)
    agent = Agent(policy, actions, env.observation_space, 0, config.env.action_mask)
    obs, info = env.reset(seed=0)
    score, ended = 0.0, False
    while not ended:
        obs, reward, terminated, truncated, info = env.step(agent.act(obs, action_mask=info.get("action_mask")))
        score, ended = score + reward, terminated or truncated
    assert names["score"] == score and names["ended"]
    assert str(names.get("about", {"env_steps": 7})["env_steps"]) == "7"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--member", "2"], "member is 2; it must be best or a number from 0 to 1"),
        (["--member", "all"], "member is 'all'; it must be best or a number from 0 to 1"),
        (["--member", "1st"], "member is '1st'; it must be best or a number from 0 to 1"),
        (["--output", "a.pt2"], "--output is a.pt2; with --format onnx it must end in .onnx"),
        (["--format", "torch", "--output", "a.onnx"], "--output is a.onnx; with --format torch it must end in .pt2"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(trained, options, sentence, capsys):
    assert main([str(trained.folder), *options]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"rlkit: {sentence}\n"


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "there is no run at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_what_brings_it(trained, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(rlkit.export, "find_spec", lambda name: None if "onnxs" in name else find(name))
    assert main([str(trained.folder), "--output", "never.onnx"]) == 2
    wanted = "rlkit: --format is onnx, which needs onnxscript: pip install 'rlkit[export]'\n"
    assert capsys.readouterr().err == wanted


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rlkit.export, "export", None)
    (tmp_path / "a.pt2").mkdir()
    for path, why in ((tmp_path / "a.pt2", "which is not a file"), ("/proc/a.pt2", "but /proc cannot be written to: ")):
        assert main([str(trained.folder), "--format", "torch", "--output", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"rlkit: --output is {path}, {why}")


def test_a_file_that_cannot_be_written_is_one_sentence_and_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([str(trained.folder), "--format", "torch", "--output", str(tmp_path / "a.pt2")]) == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
