"""Overrides as a user writes them, in Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rlkit.faults import OPEN

NOTHING = re.compile(r"(\[.*?\])|(?<![^,])(?:none|null|)(?![^,])")  # a list as it is, or a value that names nothing


def for_hydra(arguments: Iterable[str]) -> list[str]:
    """Write out what Hydra would refuse although it is clear what is meant.

    `env.kwargs={a: 1}` sets keys that the configuration does not know, which Hydra calls adding: `+env.kwargs={a: 1}`;
    `stabilizer=none`, `null` and nothing are the empty list.
    """
    return [_for_hydra(argument) for argument in arguments]


def _for_hydra(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if name in OPEN and value.startswith("{"):
        return f"+{argument}"
    if name == "stabilizer" and equals:
        return f"{name}={NOTHING.sub(lambda found: found[1] or '[]', value)}"
    return argument


def literal(value: Any, quoted: bool = False) -> str:
    """Write a Python value in Hydra's override grammar.

    Args:
        quoted: whether text is quoted that would otherwise be read as a number, true, false or null. Keys are typed, so
            that those of a configuration need it not; what an environment gets is not.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(literal(v, quoted) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{literal(v, quoted=True)}" for name, v in value.items()) + "}"
    if isinstance(value, str) and (quoted or not re.fullmatch(r"[\w.:/-]+", value)):
        return "'" + re.sub(r"(\\*)'", r"\1\1\'", value) + "'"
    return str(value)
