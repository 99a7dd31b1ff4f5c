"""What `python -m rlkit.train --help` prints."""

from __future__ import annotations

from collections.abc import Iterator

HELP = """Train PPO or GRPO on a Gymnasium environment.

  python -m rlkit.train env=CartPole algo=grpo                     with the pair's tuned settings
  python -m rlkit.train env=CartPole algo=ppo members=20 seed=100  twenty seeds at once
  python -m rlkit.train env=gym env.id=FrozenLake-v1 algo=ppo      any Gymnasium id, or module:Id-v0
  python -m rlkit.train env=CartPole 'stabilizer=[ref_kl]' stabilizer.ref_kl.coef=0.05
  python -m rlkit.train -m env=CartPole algo=ppo,grpo              a sweep; long: --multirun
  python -m rlkit.train -m algo=ppo,grpo hydra/launcher=joblib     its jobs at once, one a core
  python -m rlkit.train resume=runs/CartPole/grpo/TIME             go on in the same folder; only
                           total_steps, stop_at, eval.*, checkpoint.* and device may be given again

Choices:
"""
WIDTH, COLUMN = 100, 40  # of the page, and where the meanings of keys begin


def help_page() -> str:
    """The text of `--help`: examples, the choices of each group, every key."""
    import textwrap

    from rlkit.conf.schema import options

    groups = "\n".join(
        textwrap.fill(f"  {group:<12} {', '.join(options(group))}", WIDTH, subsequent_indent=15 * " ")
        for group in ("env", "algo", "stabilizer", "tuned", "experiment")
    )
    notes = (
        "\n\nKeys, as `key=default (type, range): meaning`. Steps are environment steps of one member. Tuned"
        "\nsettings come before the defaults shown here, and what you give on the command line before both.\n"
    )
    tail = (
        "\n\nHydra's own options: --hydra-help. Exit status: 0 done, 1 a fault or a failed job of a sweep,"
        "\n2 a configuration or checkpoint that cannot run (nothing ran), 130 Ctrl-C, 143 SIGTERM (both save"
        "\nfirst), 141 nobody reads the output (as with `| head`)."
    )
    return HELP + groups + notes + "\n".join([*_keys(), *_stabilizers()]) + tail


def _keys() -> Iterator[str]:
    """Every key of the schema with its default, type, range and meaning."""
    from rlkit.conf.schema import sections, shown, type_and_range

    for title, rows in sections():
        yield f"\n{title}:"
        for name, f, value in rows:
            default = "" if value == "???" else shown(value)
            yield _line(f"{name}={default}", f"({type_and_range(f)}): {f.metadata['doc']}")


def _stabilizers() -> Iterator[str]:
    """The same of every stabiliser; of a preset, what it is made of and sets."""
    from rlkit.conf.schema import comments, options, pieces, shown

    for name in options("stabilizer"):
        others, content = pieces(name)
        yield f"\nstabilizer={name}, which is [{','.join(others)}] with:" if others else f"\nstabilizer=[{name}]:"
        about = comments(name)
        for part, entry in content.items():
            for key, value in entry.items():
                if key != "_target_":
                    yield _line(f"stabilizer.{part}.{key}={shown(value)}", about.get(key, ""))


def _line(setting: str, about: str) -> str:
    """A key, and what it may be and means in a column beside it, or below it where it is long."""
    import textwrap

    text = textwrap.wrap(about, WIDTH - COLUMN, break_on_hyphens=False)
    if len(setting) + 3 > COLUMN or not text:
        text.insert(0, "")
    first = f"  {setting:<{COLUMN - 3}} {text[0]}".rstrip()
    return "\n".join([first, *(" " * COLUMN + line for line in text[1:])])
