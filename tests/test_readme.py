"""The examples of the README and of the documentation, executed as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rlkit.conf.schema import options
from rlkit.train import compose, execute, prepare

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "export.md"]  # see test_export.py
TEXTS = [README, *(page.read_text() for page in PAGES)]
BLOCKS = [block for text in TEXTS for block in re.findall(r"```python\n(.*?)```", text, re.S)]
FILES = {m[1]: block for block in BLOCKS if (m := re.match(r"# (\w+\.py)\n", block))}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that is the working directory and importable, as for `python -m`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def commands() -> dict[str, list[str]]:
    """The overrides of the command under each example file."""
    found = {}
    for name in FILES:
        module = name.removesuffix(".py")
        (line,) = [
            s
            for s in re.findall(r"^    python -m rlkit.train (.*)$", "\n".join(TEXTS), re.M)
            if f"{module}:" in s or f"{module}." in s
        ]
        found[name] = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", line)]
    return found


def test_there_are_five_examples_of_at_most_fifteen_lines():
    assert set(FILES) == {"corridor.py", "decay.py", "sign.py", "haste.py", "enough.py"}
    for name, block in FILES.items():
        code = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
        assert len(code) <= 15, (name, len(code))


@pytest.mark.parametrize("name", sorted(FILES))
def test_an_example_trains(name, here):
    (here / name).write_text(FILES[name])
    small = ["total_steps=600", "eval.every=300", "eval.episodes=2", "log.every=0", "num_envs=8"]
    small.append("algo.num_minibatches=2")
    if "algo=ppo" in commands()[name]:
        small.append("algo.num_steps=32")
    config, folder = compose([*commands()[name], *small])
    run = execute(prepare(config), folder, "off")
    assert np.isfinite(run.eval_return).all()
    assert run.summary["env_steps"][0] >= 600


@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in FILES.values()])
def test_a_python_example_runs(block, here):
    if "stable_baselines3" in block:
        pytest.importorskip("stable_baselines3")
    names: dict[str, object] = {}
    exec(re.sub(r"(total_\w+=)[\d_]+", r"\g<1>600", block), names)
    assert {"run", "model"} & names.keys()
    assert names.get("action", 0) in (0, 1)


def test_every_key_the_readme_names_exists():
    from rlkit.train import help_page

    page = help_page()
    for word in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", README):
        if not word.endswith((".py", ".pt", ".csv", ".json", ".md", ".yaml", ".db")):
            assert word in page, word


def test_the_docs_have_a_line_for_every_stabiliser_and_every_id():
    """One for each YAML of conf/stabilizer, and one for each id of the methods that stabilise a run."""
    text = (ROOT / "docs" / "stabilizers.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| [ACD]\d", line)]
    ids = {row[1].strip() for row in rows}
    wanted = {*(f"A{k}" for k in range(3, 8)), *(f"C{k}" for k in range(1, 7)), *(f"D{k}" for k in range(2, 11)), "D12"}
    assert ids == wanted
    named = {name for row in rows for name in re.findall(r"stabilizer=\[(\w+)\]", row[2])}
    assert named >= {name for name in options("stabilizer") if name not in ("old_kl", "recommended")}
    assert all(len(row) == 7 and all(cell.strip() for cell in row[1:6]) for row in rows)
