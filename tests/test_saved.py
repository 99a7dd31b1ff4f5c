"""The settings of a run, read by all that reads runs: each way in which their file can be wrong is one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rlkit
from rlkit import diagnose, evaluate, report, train

SMALL = {"env": "CartPole", "algo": "ppo", "tuned": "none", "total_steps": 64, "num_envs": 2, "policy.hidden": [4]}
FEW = {"algo.num_steps": 32, "eval.every": 0, "show": "off"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlkit.session.FINAL_EPISODES", 2)
        return rlkit.run(folder=tmp_path_factory.mktemp("runs") / "run", **SMALL, **FEW).folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch) -> Path:
    """A copy of a finished run, named relative to the working directory."""
    shutil.copytree(finished, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["train", f"resume={folder}", "total_steps=128"])
    return train.main()


def imitated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["train", "stabilizer=[warm_up]", f"stabilizer.warm_up.demonstrations={folder}"])
    return train.main()


def evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["evaluate", str(folder)])
    return evaluate.main()


def reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    return report.main([str(folder)])


def diagnosed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    return diagnose.main([str(folder)])


READERS = (resumed, imitated, evaluated, reported)
FILE = "run/.hydra/config.yaml"
DAMAGED = {
    "env: [\n": f"{FILE} is damaged: expected the node content, but found '<stream end>', line 2",
    "- env\n- algo\n": f"{FILE} is damaged: it holds a list, where keys and values are due",
    "": f"{FILE} is damaged: it is empty",
    "a\0b": f"{FILE} is damaged: unacceptable character #x0000: special characters are not allowed",
    "42": f"{FILE} is damaged: Invalid loaded object type: int",
}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_settings_are_the_same_sentence_wherever_they_are_read(folder, reader, text, monkeypatch, capsys):
    (folder / ".hydra" / "config.yaml").write_text(text)
    before = sorted(folder.rglob("*"))
    assert reader(folder, monkeypatch) == train.EXIT_CONFIG
    out, err = capsys.readouterr()
    assert out == "" and DAMAGED[text] in err.splitlines()[0], err
    assert "Traceback" not in err and err.startswith("rlkit: ")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_missing_settings_are_the_same_sentence_wherever_they_are_read(folder, reader, monkeypatch, capsys):
    (folder / ".hydra" / "config.yaml").unlink()
    assert reader(folder, monkeypatch) == train.EXIT_CONFIG
    assert f"there is no run at run: {FILE} does not exist" in capsys.readouterr().err


def test_a_folder_above_runs_is_no_run_but_they_are_named(folder, tmp_path, capsys):
    assert evaluate.main([str(folder.parent)]) == train.EXIT_CONFIG
    assert "config.yaml does not exist; 1 lie below it, such as " in capsys.readouterr().err


UNUSABLE = {
    "algo.clipp": (0.1, "algo.clipp is not a key of this configuration; did you mean algo.clip?"),
    "algo.gamma": (1.5, "algo.gamma is 1.5; it must be > 0 and <= 1"),
    "algo.num_steps": ("many", "algo.num_steps is many; it must be a whole number"),
}


@pytest.mark.parametrize("reader", [resumed, imitated, evaluated], ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("key", UNUSABLE)
def test_settings_that_this_version_cannot_run_are_put_down_to_their_file(folder, reader, key, monkeypatch, capsys):
    file = folder / ".hydra" / "config.yaml"
    value, sentence = UNUSABLE[key]
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist([f"{key}={value}"])), file)
    assert reader(folder, monkeypatch) == 2
    assert f"{FILE}: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["env: {id: CartPole-v1}\n", "env: 3\nalgo: 4\n", "env: {}\nalgo: {name: ppo}\n"])
def test_settings_without_environment_or_algorithm_are_damaged(folder, text, monkeypatch, capsys):
    (folder / ".hydra" / "config.yaml").write_text(text)
    assert resumed(folder, monkeypatch) == 2
    assert "is damaged: it names no environment or none of the algorithms ppo, grpo" in capsys.readouterr().err


def test_a_report_takes_runs_with_keys_of_another_version(folder, monkeypatch, capsys):
    file = folder / ".hydra" / "config.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(file), {"algo": {"of_tomorrow": 1}}), file)
    assert reported(folder, monkeypatch) == 0
    assert "CartPole-v1" in capsys.readouterr().out


@pytest.mark.parametrize("reader", [resumed, reported], ids=lambda reader: reader.__name__)
def test_damaged_overrides_are_one_sentence(folder, reader, monkeypatch, capsys):
    (folder / ".hydra" / "overrides.yaml").write_text("a: 1\n")
    assert reader(folder, monkeypatch) == train.EXIT_CONFIG
    sentence = "run/.hydra/overrides.yaml is damaged: it holds keys and values, where a list is due"
    assert sentence in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_summary_is_one_sentence(folder, text, monkeypatch, capsys):
    (folder / "summary.json").write_text(text)
    assert evaluated(folder, monkeypatch) == 2
    assert capsys.readouterr().err.startswith("rlkit: run/summary.json is damaged: ")
