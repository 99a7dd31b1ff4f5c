"""Exported policies: what onnxruntime and torch compute from the file is what the policy does."""

from __future__ import annotations

import importlib.util
import json
import logging
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
from rlkit.evaluate import Agent
from rlkit.export import METADATA, OBSERVATIONS, TOLERANCE, ExportError, difference, export, main
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
    """Random observations of a space, whatever is done."""

    def __init__(self, observed="numbers", acts="discrete"):
        self.observation_space, self.action_space = OBSERVED[observed], SPACES[acts]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 0.0, False, False, {}


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


def outputs(path: Path, obs: np.ndarray) -> dict[str, np.ndarray]:
    """What a file gives for observations, by the library its ending calls for."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        assert [x.name for x in session.get_inputs()] == ["obs"]
        names = [x.name for x in session.get_outputs()]
        return dict(zip(names, session.run(None, {"obs": obs}), strict=True))
    found = torch.export.load(path).module()(torch.from_numpy(obs))
    names = ["action", "logits"] if len(found) == 2 else ["action", "mean", "std"]
    return {name: x.detach().numpy() for name, x in zip(names, found, strict=True)}


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
    assert difference([action, mean, std], policy, actions, obs) == pytest.approx(8e-6, rel=0.1)
    std[4, 1] += 1e-3
    with pytest.raises(ExportError, match="differ from the policy's by up to 1.01e-03, above 1e-05"):
        difference([action, mean, std], policy, actions, obs)
    with pytest.raises(ExportError, match=r"shape \(8, 2\) where the policy has \(9, 2\)"):
        difference([action[:8], mean, std], policy, actions, obs)


def test_an_index_may_be_that_of_an_equal_choice_and_of_no_other(tmp_path):
    run = saved(tmp_path, "policy.hidden=[]", acts="from -1")
    state = {name: torch.zeros_like(x) for name, x in run.state.items()}
    state["actor.biases.0"] = torch.tensor([[[1.0, 1.0, 0.0]]] * 2)
    policy, actions = SavedRun(run.folder, "last", run.config, state, {}).policy(range(1))
    obs = np.zeros((2, 3), np.float32)
    logits = policy.distribution(torch.from_numpy(obs)[None]).params["logits"][0].detach().numpy()
    assert difference([np.array([-1, 0]), logits], policy, actions, obs) <= 1e-6
    with pytest.raises(ExportError, match="differ from the policy's by up to 1.00e"):
        difference([np.array([-1, 1]), logits], policy, actions, obs)


def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch, capsys):
    wrong = rlkit.export.Format(".onnx", (), lambda *_: b"x", lambda _: lambda obs: [np.zeros(len(obs))] * 3)
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
    assert f"policy.onnx: member {best}, within " in said.out and f"on {OBSERVATIONS:,} observations" in said.out
    assert said.err == ""
    model = onnx.load(trained.folder / "policy.onnx")
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert about["environment"] == "Pendulum-v1" and about["rlkit_version"] == rlkit.__version__
    assert about["member"] == about["seed"] == str(best) and about["checkpoint"] == "last"
    assert about["action_space"] == "Box(-2.0, 2.0, (1,), float32)" and "[batch, 3]" in about["observation"]
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
        "import sys, torch; m = torch.export.load(sys.argv[1]).module(); print(m(torch.ones(2, 3))[0].tolist());"
        "assert not [name for name in sys.modules if name.startswith('rlkit')]"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    agent = rlkit.load(trained.folder, member=1, checkpoint="best")
    np.testing.assert_allclose(json.loads(done.stdout), agent.act(np.ones((2, 3))), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--member", "2"], "member is 2; it must be best or a number from 0 to 1"),
        (["--member", "all"], "member is 'all'; it must be best or a number from 0 to 1"),
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


def test_a_file_that_cannot_be_written_is_one_sentence_and_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([str(trained.folder), "--format", "torch", "--output", str(tmp_path / "a.pt2")]) == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
