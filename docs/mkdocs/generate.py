"""Markdown made from the code: keys, choices, findings, exit statuses, refusals, docstrings, sections of README.md."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
from docstrings import api, arguments, body, found

from rlkit import series, symptoms, train
from rlkit.conf.schema import Config, ConfigError, allowed, options, pieces, sections, shown, type_and_range
from rlkit.series import READ, WINDOW, Series

ROOT = Path(__file__).resolve().parents[2]


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def code(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


# --- configuration ---------------------------------------------------------------------------------------------------


def keys() -> str:
    """Every key of conf/schema.py, a table for each part of the configuration."""
    tables: dict[tuple[str, str], list[tuple[str, ...]]] = {("", ""): []}  # the keys without a part come first
    for title, rows in sections():
        owner = "" if title == "Every algorithm" else f" with {title}"
        for row in rows:
            tables.setdefault((row[0].rpartition(".")[0], owner), []).append(row_of(row))
    parts = []
    for (prefix, owner), rows_of_part in tables.items():
        heading = f"{prefix}.*" if prefix else "The run"
        about = meaning(prefix) if prefix else "what is trained, and for how long"
        about = re.sub(r"^of (.*)", r"how `\1` changes over the run", about)
        parts.append(f"### {heading}{owner}\n\n{about[0].upper()}{about[1:]}.\n")
        parts.append(table(("key", "default", "type and range", "meaning"), *rows_of_part) + "\n")
    return "\n".join(parts)


def row_of(row: tuple[str, Any, Any]) -> tuple[str, str, str, str]:
    name, field, value = row
    default = "must be given" if value == "???" else f"`{shown(value)}`"
    return f'<code id="{name}">{name}</code>', default, type_and_range(field), field.metadata["doc"]


def meaning(prefix: str) -> str:
    """The meaning of a part of the configuration, from the field that holds it."""
    node: Any = Config()
    for name in prefix.split("."):
        (held,) = [f for f in fields(node) if f.name == name]
        node = getattr(node, name)
    return held.metadata["doc"]


def choices(group: str) -> str:
    """The YAML files of a group, each in a box of its own."""
    boxes = []
    for name in options(group):
        text = (ROOT / "conf" / group / f"{name}.yaml").read_text()
        boxes.append(f'??? note "{group}={name}"\n' + indented(code(text, "yaml")))
    return "\n\n".join(boxes)


def stabilizers() -> str:
    """What each stabiliser does, and its arguments."""
    return "\n\n".join(_stabilizer(name) for name in options("stabilizer"))


def _stabilizer(name: str) -> str:
    others, content = pieces(name)
    if others:
        sets = [f"`stabilizer.{part}.{k}={shown(v)}`" for part, entry in content.items() for k, v in entry.items()]
        made = " and ".join(f"[`{other}`](#stabilizer{other})" for other in others)
        return f"### stabilizer={name}\n\n{made} together, with {', '.join(sets)}."
    (entry,) = content.values()
    target = found(entry.pop("_target_"))
    texts = arguments(target)
    rows = [
        (f'<code id="stabilizer.{name}.{k}">{k}</code>', f"`{shown(v)}`", allowed(target.bounds.get(k, {})), texts[k])
        for k, v in entry.items()
    ]
    about = body(target).partition("\n\n")[0]
    heading = f"### stabilizer=[{name}] {{ #stabilizer{name} }}"
    return f"{heading}\n\n{about}\n\n" + table(("key", "default", "range", "meaning"), *rows)


# --- diagnosis and faults --------------------------------------------------------------------------------------------


def commented(module: ModuleType) -> dict[str, tuple[Any, str]]:
    """The constants of a module that a comment on their line explains: their value and the comment."""
    source = inspect.getsource(module)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    constants = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and node.end_lineno in comments:
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            constants |= {name: (getattr(module, name), comments[node.end_lineno]) for name in names}
    return constants


def read_names(program: CodeType) -> Iterator[str]:
    """Global names that a function, or one within it, reads."""
    yield from program.co_names
    for inner in program.co_consts:
        if isinstance(inner, CodeType):
            yield from read_names(inner)


def without_numbers(critic: bool) -> Series:
    """A run whose every number is unknown: what rules say of it has nan where a run's number would stand."""
    length = 4 * WINDOW
    missing = "group/degenerate" if critic else "value/"
    curves = {name: (np.full(length, np.nan), np.full((length, 1), np.nan)) for name in READ}
    return Series(1, {name: curve for name, curve in curves.items() if not name.startswith(missing)})


def findings(kind: str) -> str:
    """Each rule of a kind (faults, symptoms): what it says, why, from which level on, and what helps."""
    return "\n\n".join(_finding(rule) for rule in getattr(symptoms, kind.upper()))


def _finding(rule: symptoms.Rule) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the mean of unknown numbers
        told = {name: rule(without_numbers(critic)) for name, critic in (("PPO", True), ("GRPO", False))}
    told = {name: finding for name, finding in told.items() if finding.knob}  # else it has nothing to go by
    said = re.sub(r"nan|^0|\b0(?= %)", "…", next(iter(told.values())).sentence(0))
    helps = [finding.knob for finding in told.values()]
    if len(set(helps)) > 1:
        helps = [f"{name}: {finding.knob}" for name, finding in told.items()]
    constants = commented(symptoms) | commented(series)
    levels = [f"- `{n} = {constants[n][0]:g}`: {constants[n][1]}" for n in _read(rule) if n in constants]
    return "\n".join(
        [
            f"### {rule.__name__}\n",
            f"> {said}\n",
            f"{inspect.getdoc(rule)}\n",
            f"**What helps**: {marked('; '.join(dict.fromkeys(helps)))}.\n",
            "**Thresholds**:\n" if levels else "",
            *levels,
        ]
    )


def _read(rule: Callable[..., Any]) -> list[str]:
    return list(dict.fromkeys(read_names(rule.__code__)))


def marked(text: str) -> str:
    """The text with its keys as code, values included."""
    known = {row[0] for _, rows in sections() for row in rows}
    return re.sub(r"([a-z_.]+)(=[\w.\[\]]+)?", lambda m: f"`{m[0]}`" if m[1] in known else m[0], text)


def exits() -> str:
    """The exit statuses of the commands."""
    rows = [(f"{value}", comment) for name, (value, comment) in commented(train).items() if name.startswith("EXIT_")]
    return table(("status", "when"), ("0", "done"), *rows)


def refused(*overrides: str) -> str:
    """What a command line that cannot run is answered with."""
    from rlkit.build import to_config

    said = io.StringIO()
    try:
        to_config(train.compose([part.strip("'") for part in overrides])[0])
    except ConfigError as error:
        with contextlib.redirect_stderr(said):
            train.complain(str(error), train.EXIT_CONFIG)
    if not said.getvalue():
        raise ValueError(f"{' '.join(overrides)} is not refused")
    return code(f"$ python -m rlkit.train {' '.join(overrides)}\n{said.getvalue()}", "console")


# --- pages -----------------------------------------------------------------------------------------------------------


def readme(*title: str) -> str:
    """A section of README.md, without its heading and without those below it."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^```.*?^```", lambda block: block[0].replace("\n#", "\n\0"), text, flags=re.M | re.S)  # comments
    match = re.search(rf"^#+ {re.escape(' '.join(title))}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    if match is None:
        raise ValueError(f"README.md has no section {' '.join(title)}")
    return match[1].replace("\0", "#").strip()


def pages(folder: str) -> str:
    """A list of links to the pages of a folder of docs/, by their titles."""
    files = sorted((ROOT / "docs" / folder).glob("0*.md"))
    return "\n".join(f"- [{f.read_text().partition(chr(10))[0].lstrip('# ')}](docs/{folder}/{f.name})" for f in files)


def indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


DIRECTIVES: dict[str, Callable[..., str]] = {
    made.__name__: made for made in (keys, choices, stabilizers, findings, exits, refused, api, readme, pages)
}
