"""What phases have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.keepers.keeper import Event
from rlkit.optimizer import Adam
from rlkit.policy import Policy


class Phase:
    """Trains the policy before the first iteration, by the update that the run uses, with another chain."""

    bounds: ClassVar[Mapping[str, dict[str, Any]]] = {}  # of the arguments, as in `rlkit.conf.schema.key`

    def __call__(self, policy: Policy, optimizer: Adam) -> list[Event]:
        """Go through the phase; return (member, sentence) of what it did."""
        raise NotImplementedError
