"""What `python -m rlkit.train --help` prints."""

from __future__ import annotations

HELP = """Train PPO or GRPO on a Gymnasium environment.

  python -m rlkit.train env=CartPole algo=grpo                    one run with the pair's tuned settings
  python -m rlkit.train env=CartPole algo=ppo members=20 seed=100 twenty independent seeds at once
  python -m rlkit.train env=gym env.id=FrozenLake-v1 algo=ppo     any Gymnasium id, also module:Id-v0
  python -m rlkit.train -m env=CartPole algo=ppo,grpo             a sweep; --multirun is the long form
  python -m rlkit.train -m algo=ppo,grpo hydra/launcher=joblib    its jobs at once, one for each core
  python -m rlkit.train env=CartPole 'stabilizer=[ref_kl]' stabilizer.ref_kl.coef=0.05
  python -m rlkit.train resume=runs/CartPole/grpo/TIME            go on from the last checkpoint, in the same folder;
                                        total_steps, stop_at, eval.*, checkpoint.* and device may be given again

Choices:
"""


def help_page() -> str:
    """The text of `--help`: examples, the choices of each group, every key."""
    import textwrap

    from rlkit.conf.schema import help_text, options

    groups = "\n".join(
        textwrap.fill(f"{group:<12} {', '.join(options(group))}", 110, initial_indent="  ", subsequent_indent=" " * 15)
        for group in ("env", "algo", "stabilizer", "tuned", "experiment")
    )
    notes = (
        "\n\nKeys (`name=default meaning (range)`; steps are environment steps of one member; tuned settings come"
        "\nbefore the defaults shown here, and what you give on the command line before both):\n"
    )
    tail = (
        "\n\nHydra's own options: --hydra-help. Exit status: 0 done, 1 a fault or a failed job of a sweep,"
        "\n2 a configuration or checkpoint that cannot run (nothing ran), 130 Ctrl-C, 143 SIGTERM (both save first),"
        "\n141 nobody reads the output (as with `| head`)."
    )
    return HELP + groups + notes + help_text() + tail
