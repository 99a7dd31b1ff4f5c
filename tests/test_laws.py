"""The six laws of links and members, as a table of links x laws."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import demonstrations, small_learner, train, weights
from gymnasium import Env
from gymnasium.vector import VectorEnv
from omegaconf import DictConfig

from rlkit.conf.schema import Config
from rlkit.link import Chain, Link
from rlkit.loop import Learner

KINDS = ("exact", "k1", "k2", "k3")
CLONING = ["stabilizer=[cloning]", f"stabilizer.cloning.demonstrations={demonstrations()}"]
# name -> (overrides that switch the link on, overrides that give it coefficient zero, or None where it has none)
LINKS: dict[str, tuple[list[str], list[str] | None]] = {
    "surrogate": ([], None),
    "entropy": (["algo.entropy_coef=0.01"], ["algo.entropy_coef=0"]),
    **{
        f"ref_kl {kind}": (
            ["stabilizer=[ref_kl]", "stabilizer.ref_kl.coef=0.1", f"stabilizer.ref_kl.kind={kind}"],
            ["stabilizer=[ref_kl]", "stabilizer.ref_kl.coef=0", f"stabilizer.ref_kl.kind={kind}"],
        )
        for kind in KINDS
    },
    "ref_kl refreshed": (
        ["stabilizer=[ref_kl]", "stabilizer.ref_kl.refresh_every=2"],
        ["stabilizer=[ref_kl]", "stabilizer.ref_kl.refresh_every=2", "stabilizer.ref_kl.coef=0"],
    ),
    "reward_scale": (["env.normalize_reward=true"], None),
    **{
        f"exploration {kind}": (
            [f"exploration.name={kind}"],
            [f"exploration.name={kind}", "exploration.scale=0"],
        )
        for kind in ("linear", "correlated")
    },
    "cloning": (
        [*CLONING, "stabilizer.cloning.decay=0.5", "stabilizer.cloning.batch_size=32"],
        [*CLONING, "stabilizer.cloning.coef=0"],
    ),
    "normalize_observation": (["env.normalize_observation=true"], None),
}
ALGOS = ("ppo", "grpo")
every_link = pytest.mark.parametrize("link", LINKS)
every_algo = pytest.mark.parametrize("algo", ALGOS)


@every_algo
@pytest.mark.parametrize("link", [name for name, (_, off) in LINKS.items() if off is not None])
def test_law_1_a_zero_coefficient_changes_no_bit(algo, link):
    plain = train(small_learner(algo, "members=2"), 3)
    off = LINKS[link][1]
    assert off is not None
    zero = train(small_learner(algo, "members=2", *off), 3)
    assert torch.equal(weights(zero), weights(plain))


@every_algo
def test_law_1_the_coefficient_of_each_link_matters(algo):
    """The law above would hold for links that do nothing."""
    plain = train(small_learner(algo, "members=2"), 3)
    for on in (LINKS["entropy"][0], LINKS["ref_kl exact"][0], LINKS["cloning"][0]):
        assert not torch.equal(weights(train(small_learner(algo, "members=2", *on), 3)), weights(plain))


def test_law_1_a_zero_value_coefficient_trains_the_actor_as_without_the_link():
    zero = small_learner("ppo", "algo.value_coef=0")
    without = small_learner("ppo", "algo.value_coef=0")
    del without.chain.links["value"]
    assert torch.equal(weights(train(zero, 3)), weights(train(without, 3)))


@every_algo
@every_link
def test_law_2_batch_keeps_the_number_of_rows(algo, link):
    learner = small_learner(algo, "members=2", *LINKS[link][0])
    seen = []
    original = learner.chain.batch

    def spy(batch):
        result = original(batch)
        seen.append((batch.height, result.height, set(batch) <= set(result)))
        return result

    learner.chain.batch = spy
    train(learner, 2)
    assert len(seen) == 2
    assert all(before == after and kept for before, after, kept in seen)


@every_algo
@every_link
def test_law_3_save_load_and_one_more_update_is_bit_identical(algo, link, tmp_path):
    overrides = ["members=2", *LINKS[link][0]]
    whole = train(small_learner(algo, *overrides), 2)
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed = small_learner(algo, *overrides)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(whole, 2)
    train(resumed, 2)
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(resumed.env_steps, whole.env_steps)
    assert torch.equal(resumed.optimizer.m, whole.optimizer.m)


def test_law_3_every_tensor_of_the_state_starts_with_the_member_axis():
    learner = train(small_learner("ppo", "members=3", *LINKS["ref_kl exact"][0], *LINKS["reward_scale"][0]), 1)
    state = learner.state_dict()

    def leaves(x):
        if isinstance(x, dict):
            for value in x.values():
                yield from leaves(value)
        elif isinstance(x, torch.Tensor):
            yield x

    shapes = [tuple(leaf.shape) for leaf in leaves(state)]
    assert len(shapes) > 20
    assert all(shape[:1] == (3,) for shape in shapes), shapes


@every_algo
@every_link
def test_law_4_links_draw_from_their_own_streams_and_hold_nothing_else(algo, link):
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    learner = train(small_learner(algo, "members=2", *LINKS[link][0]), 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert not [x for x in reachable(learner.chain) if isinstance(x, (Learner, VectorEnv, Env, Config, DictConfig))]


def reachable(x, seen=None):
    """Every object a link holds, through attributes and containers."""
    seen = {} if seen is None else seen
    if id(x) in seen or isinstance(x, (str, int, float, torch.Tensor, type(None))):
        return
    seen[id(x)] = x
    yield x
    children = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, (list, tuple, set)) else []
    children += list(vars(x).values()) if hasattr(x, "__dict__") and not isinstance(x, type) else []
    for child in children:
        yield from reachable(child, seen)


def together(*selections: list[str]) -> list[str]:
    """The overrides of several links, whose stabilisers are selected side by side."""
    overrides = list(itertools.chain(*selections))
    selected = [o.removeprefix("stabilizer=[")[:-1] for o in overrides if o.startswith("stabilizer=[")]
    others = [o for o in overrides if not o.startswith("stabilizer=[")]
    return [f"stabilizer=[{','.join(dict.fromkeys(selected))}]", *dict.fromkeys(others)]


@every_algo
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(LINKS, 2)))
def test_law_5_every_pair_runs_and_the_order_of_losses_is_rounding(algo, first, second):
    both = together(LINKS[first][0], LINKS[second][0])
    learner = train(small_learner(algo, "members=2", *both), 2)
    assert weights(learner).isfinite().all()
    turned = small_learner(algo, "members=2", *both)
    turned.chain.links = dict(reversed(turned.chain.links.items()))
    torch.testing.assert_close(weights(train(turned, 2)), weights(learner), rtol=1e-4, atol=1e-5)


@every_algo
@every_link
def test_law_6_a_member_among_others_learns_as_alone(algo, link):
    together = train(small_learner(algo, "members=3", "seed=5", *LINKS[link][0]), 3)
    for m in range(3):
        alone = train(small_learner(algo, f"seed={5 + m}", *LINKS[link][0]), 3)
        assert together.env_steps[m] == alone.env_steps[0]
        torch.testing.assert_close(weights(together)[m], weights(alone)[0], rtol=1e-4, atol=1e-5)


@every_algo
def test_law_6_a_frozen_member_stays_and_the_others_do_not_notice(algo):
    whole = train(small_learner(algo, "members=3"), 3)
    frozen = train(small_learner(algo, "members=3"), 1)
    frozen.frozen[1] = True
    before, steps = weights(frozen)[1].clone(), int(frozen.env_steps[1])
    train(frozen, 2)
    assert torch.equal(weights(frozen)[1], before)
    assert int(frozen.env_steps[1]) == steps
    torch.testing.assert_close(weights(frozen)[[0, 2]], weights(whole)[[0, 2]], rtol=1e-4, atol=1e-5)


def test_a_chain_is_a_link_and_prefixes_names():
    class One(Link):
        def losses(self, out, batch, policy):
            return {"loss": torch.ones(1, 1)}

    nested = Chain(outer=Chain(inner=One()), other=One())
    assert set(nested.losses(None, None, None)) == {"outer/inner/loss", "other/loss"}


def test_a_link_refuses_state_it_does_not_have():
    with pytest.raises(ValueError, match="has no state"):
        Link().load_state_dict({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="the checkpoint holds links"):
        Chain(a=Link()).load_state_dict({"b": {}})


def test_fields_of_a_rollout_are_documented():
    from rlkit.buffer import Rollout

    assert {f.name for f in dataclasses.fields(Rollout)} >= {"obs", "final_obs", "action", "log_prob", "valid", "group"}
