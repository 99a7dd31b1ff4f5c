"""Modules that a user names: an environment's, an estimator's, a link's."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType


def load_module(name: str) -> ModuleType:
    """Import a module.

    Raises:
        ImportError: it cannot be, whatever it raised; one sentence that says where.
    """
    try:
        if not name.strip(".") or name.startswith("."):
            raise ImportError(f"{name!r} is not the name of a module")
        return importlib.import_module(name)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # the module's own code may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" in {frame.filename}, line {frame.lineno}"
        words = str(error).strip().partition("\n")[0]
        raise ImportError(f"{type(error).__name__}: {words}{where}") from error
