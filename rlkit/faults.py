"""What is wrong with a command line or a configuration, in one sentence that names the key, the value and a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Self

from rlkit.conf.schema import Config, ConfigError, GRPOConfig, PPOConfig, choice, keys, options, type_in_words


class Fault(RuntimeError):
    """What ends a run whose configuration was sound; the message is one sentence, and no stack trace is needed.

    Args:
        text: what happened, in one sentence; `{member}` in it stands for the member's number.
        member: whom it happened to.
        trace: the stack trace of a user's own code, to be shown before the sentence; empty where there is none.
    """

    def __init__(self, text: str, member: int | None = None, trace: str = "") -> None:
        super().__init__(text, member, trace)
        self.text, self.member, self.trace = text, member, trace
        if trace:
            self.add_note(trace)

    def __str__(self) -> str:
        return self.text.replace("{member}", str(self.member))

    def of_member(self, member: int) -> Self:
        """Return it with another number of the member: the one it has in the whole run."""
        return type(self)(self.text, member, self.trace)


GROUPS = ("env", "algo", "stabilizer", "tuned", "experiment")
NO_CHOICE = re.compile(r"null|true|false|nan|inf|\{.*|[-+]?[\d._]+(e[-+]?\d+)?|", re.IGNORECASE)  # not words of a group
LISTED = 12  # names that a sentence lists although it knows the nearest
OPEN = {"env.kwargs": "the environment's constructor", "algo.advantage_args": "the estimator"}  # keys of one's own
# fmt: off
HYDRA_OPTIONS = {
    "-h", "--help", "-hh", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run",
    "-m", "--multirun", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name", "-cd",
    "--config-dir", "--experimental-rerun", "-i", "--info",
}
# fmt: on


def check_arguments(arguments: Iterable[str]) -> None:
    """Refuse what Hydra would pass over without a word or answer with a page of usage.

    Raises:
        ConfigError: the first such argument.
    """
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "tuned":  # an optional entry of the defaults list: Hydra passes over a misspelt one
            for wanted in value.split(","):
                if wanted not in options("tuned"):
                    raise ConfigError(unknown("tuned", wanted, options("tuned")))
        elif name in GROUPS and _no_choice(name, value):
            raise ConfigError(unknown(name, value, options(name)))
        elif argument in ("~env", "~algo"):
            group = argument[1:]
            raise ConfigError(f"{argument} leaves no {group}; it must be one of {', '.join(options(group))}")
        elif name.startswith("-") and name not in HYDRA_OPTIONS:
            raise ConfigError(f"{argument} is not an option; keys are written without dashes: members=4")


def _no_choice(group: str, value: str) -> bool:
    """Whether a group is given a value that is no word, and of env and algo also no list of words."""
    if group == "experiment" and value == "null":
        return False
    return NO_CHOICE.fullmatch(value) is not None or (group in ("env", "algo") and value.startswith("["))


def unknown(key: str, value: str, known: list[str]) -> str:
    """Say which values of a key exist and which is nearest to the one given."""
    hint = _nearest(value, known, 0.5)
    if hint and len(known) > LISTED:
        return f"{key} is {value!r}, which is none of the {len(known)} that --help lists{hint}"
    return f"{key} is {value!r}; it must be {'one of ' if known[1:] else ''}{', '.join(known) or 'left out'}{hint}"


def sentence(error: Exception) -> str:
    """Say what Hydra or OmegaConf found wrong: the key, the value, and what would do."""
    text, cause = str(error), str(error.__cause__ or error)
    missing = re.search(r"Could not (?:find|load) '(\w+)/([^']*)'", text)
    if missing and missing[1] in GROUPS:
        return unknown(missing[1], missing[2], options(missing[1]))
    unread = re.match(r"Error parsing override '(.*)'", text)
    given = unread[1] if unread else getattr(error, "override", None)  # of the parser itself
    if given:
        return f"{given} cannot be read; write key=value, and quote a value with special characters"
    several = re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text)
    if several:
        return f"{several[1]} is {several[2]}, several values; add -m to train each of them in turn"
    absent = re.search(r"Could not override '([^']+)'", text)
    if absent:
        return no_such_key(absent[1])
    wrong = re.match(r"Error merging override (\S+?)=(.*)", text)
    full_key = re.search(r"full_key: ([\w.]+)", cause)
    if wrong and full_key:
        return wrong_type(full_key[1], wrong[2])
    file = re.match(r"In '(.*?)': \w+ raised while composing config:\n", text)
    said = text[file.end() :] if file else cause
    held = _in_a_file(said, full_key[1]) if full_key else ""
    if file:
        reason = said.splitlines()[0]
        return f"{file[1]}.yaml: {held or (f'{full_key[1]}: {reason}' if full_key else reason)}"
    if held:
        return held
    subject = text.split("\n")[0].replace("Error merging override ", "")
    reason = cause.split("\n")[0]
    if full_key and full_key[1] not in subject:
        subject = f"{full_key[1]}: {subject}"
    return subject if reason in subject else f"{subject}: {reason}"


def _in_a_file(said: str, key: str) -> str:
    """Say what OmegaConf found wrong with a key that a YAML file holds; nothing if that is something else."""
    if re.match(r"Key '.*' not in '|Key '.*' is not in struct", said):
        return no_such_key(key)
    value = re.match(r"Value '(.*)' of type '.*' could not be converted", said)
    return wrong_type(key, value[1]) if value else ""


def _known() -> dict[str, tuple[str, str]]:
    """Every key of a configuration -> (the algorithms that have it, its type in words)."""
    known: dict[str, tuple[str, str]] = {}
    for algo, config in (("ppo", PPOConfig()), ("grpo", GRPOConfig())):
        for name, f, _ in keys(Config(algo=config)):
            known[name] = (f"{known[name][0]} {algo}" if name in known else algo, type_in_words(f))
    return known


def no_such_key(name: str) -> str:
    """Say that a key does not exist (here), and what was probably meant."""
    known = _known()
    for key, owner in OPEN.items():
        if name.startswith(key):
            return f"{name} is not set yet; write +{name}=... to add an argument of {owner}"
    group, _, rest = name.partition(".")
    entry, _, own = rest.partition(".")
    if group == "stabilizer" and entry in options("stabilizer"):
        held = choice("stabilizer", entry)[entry]
        if own in held:
            return f"{name} is a key of the stabiliser {entry}, which is not selected: add 'stabilizer=[{entry}]'"
        keys_held = ", ".join(key for key in held if not str(key).startswith("_"))
        return f"{name} is not a key of the stabiliser {entry}, which has {keys_held}{_nearest(own, held, 0.6)}"
    if name in known:
        return f"{name} is a key of algo={known[name][0]} alone"
    hint = _nearest(name, [*known, *(() if rest else GROUPS)], 0.6) or "; --help lists the keys"
    return f"{name} is not a key of this configuration{hint}"


def missing(name: str | None) -> str:
    """Say that a key without a default was not given."""
    return f"{name} must be given{', as in env=gym env.id=LunarLander-v3' if name == 'env.id' else ''}"


def _nearest(word: str, known: Iterable[str], cutoff: float) -> str:
    """A question that names the nearest of the known words; nothing if none is near."""
    folded = {other.lower(): other for other in sorted(known)}
    near = get_close_matches(word.lower(), folded, 1, cutoff)
    return f"; did you mean {folded[near[0]]}?" if near else ""


def wrong_type(name: str, value: str) -> str:
    """Say that the value of a key is of another type than it must be."""
    known, value = _known(), value or "empty"
    if name in known:
        return f"{name} is {value}; it must be {known[name][1]}"
    inside = [other for other in known if other.startswith(f"{name}.")]
    return f"{name} is {value}; it is not one value but holds keys: {', '.join(inside)}"
