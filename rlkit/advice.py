"""What to set against a finding: moves of settings, said so that they fit what the run has set already.

A move is said with the value to try and the present one, `algo.learning_rate=0.0001 (now 0.0003)`, and left out where
it is made already or belongs to the other algorithm; the finding's next move then comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.conf.schema import options, shown
from rlkit.recorded import stabilizers

Settings = Mapping[str, Any]  # full key -> value of every leaf of the configuration; empty where it is not known
STEP = 3.0  # factor by which a learning rate or a coefficient is moved
ENTROPY_COEF, TARGET_KL, END_DROP = 0.01, 0.02, 0.01  # what is tried first
RATE_LOW, RATE_HIGH = 1e-4, 1e-3  # a learning rate far outside goes here at once
WIDEST = 1024  # units of a hidden layer
EXHAUSTED = "what usually helps is set already"


@dataclass(frozen=True)
class Move:
    """A change of settings.

    Attributes:
        words: how it is said where the run's settings are not known; empty: not at all.
        said: how it is said of a run with these settings; empty where it has nothing to gain there.
    """

    words: str
    said: Callable[[Settings], str]


def advise(settings: Settings, *moves: Move, verb: str = "helps") -> str:
    """Say in a clause which of some moves a run can make."""
    texts = [text for move in moves if (text := move.said(settings) if settings else move.words)]
    if not texts:
        return EXHAUSTED
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) + f" {verb}"


def written(key: str, value: Any, now: Any) -> str:
    """A setting as the command line takes it, with the present value where that is a number or a list of them."""
    measured = isinstance(now, (int, float, list)) and not isinstance(now, bool)
    return f"{key}={shown(value)}{f' (now {shown(now)})' * measured}"


def change(key: str, words: str, to: Callable[[Any], Any]) -> Move:
    """Move a key from its value to another; to None where there is none."""

    def said(settings: Settings) -> str:
        now = settings.get(key)
        value = to(now) if key in settings else None
        return "" if value is None or value == now else written(key, value, now)

    return Move(words, said)


def on(key: str) -> Move:
    """Switch on what is off."""
    return change(key, f"{key}=true", lambda now: True)


def lower(key: str) -> Move:
    """Divide a coefficient."""
    return change(key, f"a smaller {key}", lambda now: _rounded(now / STEP) or None)


def more(key: str, word: str = "more") -> Move:
    """Double a number."""
    return change(key, f"{word} {key}", lambda now: 2 * now or None)


def fewer(key: str) -> Move:
    """Halve a whole number that is above 1."""
    return change(key, f"fewer {key}", lambda now: now // 2 or None)


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


# --- moves of one key ------------------------------------------------------------------------------------------------

target_kl = change(
    "algo.target_kl",
    f"algo.target_kl={TARGET_KL}",
    lambda now: TARGET_KL if now is None or now > TARGET_KL else None,
)
return_to_go = change("algo.advantage", "algo.advantage=return_to_go", lambda now: "return_to_go")
patience = change("stabilizer.rollback.patience", "", lambda now: 1)
end_drop = change("stabilizer.rollback.end_drop", "", lambda now: END_DROP if now is None else None)


# --- moves that look at several keys ---------------------------------------------------------------------------------


def _rate(settings: Settings, up: bool = False, down: bool = False) -> str:
    """A higher learning rate, a lower one, or both; of one that follows KL by itself, of the KL that it follows."""
    follows = settings.get("algo.schedule.learning_rate.name") == "kl_adaptive"
    key = "algo.schedule.learning_rate.target" if follows else "algo.learning_rate"
    now = settings.get(key)
    if not now:
        return ""
    low, high = (0.0, math.inf) if follows else (RATE_LOW, RATE_HIGH)
    both = up and down
    values = [max(STEP * now, low)] * (up and not (both and now > high))
    values += [min(now / STEP, high)] * (down and not (both and now < low))
    return f"{key}={' or '.join(shown(_rounded(value)) for value in values)} (now {shown(now)})"


lower_rate = Move("a lower algo.learning_rate", lambda settings: _rate(settings, down=True))
higher_rate = Move("a higher algo.learning_rate", lambda settings: _rate(settings, up=True))
another_rate = Move("another algo.learning_rate", lambda settings: _rate(settings, up=True, down=True))


def _entropy(settings: Settings) -> str:
    """The weight of the bonus; of one that follows a target by itself, the target."""
    key, now = "algo.entropy_coef", settings.get("algo.entropy_coef")
    if settings.get("algo.schedule.entropy_coef.name") == "target_entropy":
        key, now = "algo.schedule.entropy_coef.target", settings["algo.schedule.entropy_coef.target"]
        return written(key, _rounded(now + max(abs(now), ENTROPY_COEF) / 2), now)
    if now is None:
        return ""
    return written(key, ENTROPY_COEF if now < ENTROPY_COEF else _rounded(2 * now), now or None)


entropy = Move(f"algo.entropy_coef={ENTROPY_COEF}", _entropy)


def _exploration(settings: Settings) -> str:
    if settings.get("exploration.name") == "none":
        return "exploration.name=linear"
    scale = settings.get("exploration.scale")
    return written("exploration.scale", _rounded(2 * scale), scale) if scale else ""


exploration = Move("exploration.name=linear", _exploration)


def _rollback(settings: Settings) -> str:
    """The list that adds it to what is selected; a link of the user's own is not of the list."""
    names = stabilizers(dict(settings))
    if "rollback" in names or not settings.get("eval.every", 1):  # it judges evaluations
        return ""
    return f"stabilizer=[{','.join([*(name for name in names if name in options('stabilizer')), 'rollback'])}]"


rollback = Move("stabilizer=[rollback]", _rollback)


def _num_envs(settings: Settings) -> str:
    """Twice as many environments, where a rollout of them still fits in the run."""
    now = settings.get("num_envs")
    if now is None or 2 * now * settings.get("algo.num_steps", 1) > settings.get("total_steps", 0):
        return ""
    return written("num_envs", 2 * now, now)


more_envs = Move("more num_envs", _num_envs)


def _group_size(settings: Settings) -> str:
    """Twice as large groups, with as many environments as they take."""
    size, envs = settings.get("algo.group_size"), settings.get("num_envs", 0)
    if size is None:
        return ""
    if envs % (2 * size) == 0:
        return written("algo.group_size", 2 * size, size)
    if 2 * envs > settings.get("total_steps", 0):
        return ""
    return f"algo.group_size={2 * size} num_envs={2 * envs} (now {size} and {envs})"


larger_groups = Move("a larger algo.group_size", _group_size)


def _critic(settings: Settings) -> str:
    """Twice as wide layers of a critic of its own."""
    now = settings.get("policy.critic_hidden") or settings.get("policy.hidden")
    if not now or max(now) >= WIDEST or "algo.value_coef" not in settings or settings.get("policy.shared_trunk"):
        return ""
    return written("policy.critic_hidden", [2 * width for width in now], list(now))


larger_critic = Move("a larger policy.critic_hidden", _critic)


def _popart(settings: Settings) -> str:
    off = settings.get("policy.value_normalization") == "none" and "algo.value_coef" in settings
    return "policy.value_normalization=popart" if off else ""


popart = Move("", _popart)
