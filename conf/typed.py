"""The dataclasses of `schema` as typed OmegaConf nodes, which also take a whole number that is written 1e5."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import DictConfig, IntegerNode, OmegaConf


class Whole(IntegerNode):
    """A whole number, also where it is written as a float: 1e5 is 100000, 1.5 is refused."""

    def _validate_and_convert_impl(self, value: Any) -> int:
        return super()._validate_and_convert_impl(whole(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        copy = Whole()
        self._deepcopy_impl(copy, memo)
        return copy


def whole(value: Any) -> Any:
    """A float without a fraction as an int; every other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def typed(config: Any) -> DictConfig:
    """A config dataclass as OmegaConf holds it; each key keeps its type, and a key of type int is a `Whole`."""
    node: DictConfig = OmegaConf.structured(_with_nodes(config))
    return node


def _with_nodes(config: Any) -> Any:
    nodes: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            nodes[f.name] = _with_nodes(value)
        elif f.type in ("int", "int | None"):
            nodes[f.name] = Whole(value, is_optional="None" in f.type)
    return dataclasses.replace(config, **nodes)
