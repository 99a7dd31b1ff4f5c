"""Registers the native environments with Gymnasium once both packages are imported, whichever comes first.

`import rlkit` is to stay cheap, so it does not import Gymnasium; and `gymnasium.make_vec("rlkit:...")` does nothing
with a module that is imported already.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class GymnasiumFinder:
    """A finder of `sys.meta_path`: finds Gymnasium as the others do, and registers our environments when it is loaded.

    Not derived from `importlib.abc.MetaPathFinder`, whose import takes longer than the rest of rlkit's.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "gymnasium":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                importlib.import_module("rlkit.envs")

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_environments() -> None:
    """Register now if Gymnasium is imported, otherwise as soon as it is."""
    if "gymnasium" in sys.modules:
        importlib.import_module("rlkit.envs")
    else:
        sys.meta_path.insert(0, GymnasiumFinder())
