"""The built wheel: what is in it, and that it trains elsewhere, beside a user's own `envs/` and `conf/`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rlkit

ROOT = Path(__file__).resolve().parents[1]
WHERE = "import rlkit.conf, rlkit.envs; print(rlkit.conf.__file__); print(rlkit.envs.__file__)"


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run a command in `cwd`, with `path` before everything installed; return what it printed."""
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.pop("PYTHONPATH", None)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone would hold: no ignored file, no build left from before."""
    copy = tmp_path_factory.mktemp("checkout")
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a second copy so that the checkout stays as it was cloned."""
    source = tmp_path_factory.mktemp("source") / "rlkit"
    shutil.copytree(checkout, source)
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ".")
    run(sys.executable, "-m", "pip", *build, cwd=source)
    [built] = folder.glob("rlkit-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("installed")
    install = ("install", "--no-deps", "--no-index", "--target", folder, wheel)
    run(sys.executable, "-m", "pip", *install, cwd=folder)
    return folder


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A user's folder with an `envs/` and a `conf/` of their own, which fail when they are taken for ours."""
    for name in ("envs", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s own {name}')\n")
    (tmp_path / "conf" / "config.yaml").write_text("total_steps: nonsense\n")
    return tmp_path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_every_file_of_the_three_folders_and_no_other(checkout: Path, wheel: Path) -> None:
    homes = {
        "rlkit": "rlkit",
        "envs": "rlkit/envs",
        "conf": "rlkit/conf",
    }  # folder in the checkout -> in the wheel
    expected = {
        f"{home}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, home in homes.items()
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert {"rlkit/py.typed", "rlkit/conf/config.yaml", "rlkit/envs/__init__.py"} <= held


def test_the_wheel_trains_beside_foreign_envs_and_conf(installed: Path, foreign: Path) -> None:
    train = ("env=CartPole", "algo=ppo", "total_steps=2048", "eval.every=0")
    run(sys.executable, "-m", "rlkit.train", *train, cwd=foreign, path=installed)
    [summary] = foreign.glob("runs/CartPole/ppo/*/summary.json")
    assert json.loads(summary.read_text())["status"] == ["finished"]


def test_the_wheel_s_help_lists_the_choices_of_conf(installed: Path, foreign: Path) -> None:
    shown = run(sys.executable, "-m", "rlkit.train", "--help", cwd=foreign, path=installed)
    assert re.search(r"^\s*env .*CartPole", shown, re.MULTILINE)


def test_the_wheel_uses_its_own_envs_and_conf(installed: Path, foreign: Path) -> None:
    conf, envs = run(sys.executable, "-c", WHERE, cwd=foreign, path=installed).split()
    assert Path(conf) == installed / "rlkit" / "conf" / "__init__.py"
    assert Path(envs) == installed / "rlkit" / "envs" / "__init__.py"


def test_a_checkout_uses_its_own_envs_and_conf_beside_an_installed_wheel(installed: Path, checkout: Path) -> None:
    conf, envs = run(sys.executable, "-c", WHERE, cwd=checkout, path=installed).split()
    assert Path(conf) == checkout / "conf" / "__init__.py"
    assert Path(envs) == checkout / "envs" / "__init__.py"


def test_the_wheel_states_version_and_python(metadata: Message) -> None:
    assert metadata["Name"] == "rlkit"
    assert metadata["Version"] == rlkit.__version__
    assert metadata["Requires-Python"] == ">=3.11"


def test_constraints_pin_all_that_make_installs_within_the_wheel_s_requirements(metadata: Message) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    wanted = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": "dev"})]
    assert {"torch", "gymnasium", "pytest"} <= {r.name for r in wanted}
    wrong = [str(r) for r in wanted if r.name not in pins or pins[r.name] not in r.specifier]
    assert not wrong, f"missing in constraints.txt, or pinned out of range: {wrong}"
    assert "+" not in pins["torch"]  # a local label such as +cpu exists in one index only


@pytest.mark.parametrize("line", ["import envs", "from envs.gym import x", "import conf.schema", "from conf import y"])
def test_lint_refuses_a_second_import_name(line: str) -> None:
    command = (
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "TID",
        "--stdin-filename",
        "rlkit/new.py",
        "-",
    )
    done = subprocess.run(command, cwd=ROOT, input=f"{line}\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "TID251" in done.stdout, done.stdout + done.stderr
