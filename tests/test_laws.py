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
KEEP_CLIP = "algo.schedule.clip.final=0.2"  # where it begins
NO_ROLLBACK = "stabilizer.rollback.most=0"
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
    **{
        f"ref_kl {rule}": (
            ["stabilizer=[ref_kl]", f"stabilizer.ref_kl.controller={rule}", "stabilizer.ref_kl.target=1e-6"],
            ["stabilizer=[ref_kl]", f"stabilizer.ref_kl.controller={rule}", "stabilizer.ref_kl.coef=0"],
        )
        for rule in ("adaptive", "stepped", "proportional")
    },
    "ref_kl linear": (
        ["stabilizer=[ref_kl]", "stabilizer.ref_kl.controller=linear"],
        [
            "stabilizer=[ref_kl]",
            "stabilizer.ref_kl.controller=linear",
            "stabilizer.ref_kl.coef=0",
            "stabilizer.ref_kl.final=0",
        ],
    ),
    "old_kl": (
        ["stabilizer=[old_kl]", "stabilizer.old_kl.target=1e-6"],
        ["stabilizer=[old_kl]", "stabilizer.old_kl.coef=0"],
    ),
    "policy gradient": (["experiment=policy_gradient"], None),
    "kl_ppo": (["experiment=kl_ppo"], None),
    "aggregation episode": (["algo.aggregation=episode"], None),
    "aggregation constant": (["algo.aggregation=constant"], None),
    "clip_high": (["algo.clip=0.1", "algo.clip_high=0.15"], ["algo.clip_high=0.2"]),
    "ratio_bound": (["algo.ratio_bound=1.21", "algo.learning_rate=0.05"], ["algo.ratio_bound=1e9"]),
    "critic_hidden": (["policy.critic_hidden=[4]"], None),
    "clip linear": (["algo.schedule.clip.name=linear"], ["algo.schedule.clip.name=linear", KEEP_CLIP]),
    "clip exponential": (["algo.schedule.clip.name=exponential"], ["algo.schedule.clip.name=exponential", KEEP_CLIP]),
    "clip kl_driven": (["algo.schedule.clip.name=kl_driven", "algo.schedule.clip.target=1e-3"], None),
    "learning rate kl_adaptive": (["algo.schedule.learning_rate.name=kl_adaptive"], None),
    "target_kl": (["algo.target_kl=1e-6"], ["algo.target_kl=1e9"]),
    "adam_betas": (["algo.adam_betas=[0.9,0.9]"], None),
    "target entropy": (
        [
            "algo.entropy_coef=0.01",
            "algo.schedule.entropy_coef.name=target_entropy",
            "algo.schedule.entropy_coef.target=0.3",
        ],
        None,
    ),
    "rollback": (["stabilizer=[rollback]", "stabilizer.rollback.patience=1"], ["stabilizer=[rollback]", NO_ROLLBACK]),
    "early_stop": (["stabilizer=[early_stop]"], ["stabilizer=[early_stop]"]),
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
    "layer_norm": (["policy.layer_norm=true"], None),
    "dropout": (["policy.dropout=0.3"], None),
    "value_l2": (
        ["stabilizer=[value_l2]", "stabilizer.value_l2.coef=0.1"],
        ["stabilizer=[value_l2]", "stabilizer.value_l2.coef=0"],
    ),
    **{f"value {kind}": ([f"policy.value_normalization={kind}"], None) for kind in ("running", "popart")},
    "replay": (["stabilizer=[replay]"], ["stabilizer=[replay]", "stabilizer.replay.fraction=0"]),
    "replay priority": (
        ["stabilizer=[replay]", "stabilizer.replay.sampling=priority"],
        ["stabilizer=[replay]", "stabilizer.replay.sampling=priority", "stabilizer.replay.fraction=0"],
    ),
    "hybrid": (["algo.sync_every=2"], ["algo.sync_every=1"]),
}
# one of each kind, for every pair: of variants that set the same key only one can be on
PAIRED = (
    "entropy",
    "ref_kl adaptive",
    "old_kl",
    "aggregation episode",
    "clip_high",
    "ratio_bound",
    "clip kl_driven",
    "learning rate kl_adaptive",
    "target_kl",
    "target entropy",
    "rollback",
    "early_stop",
    "reward_scale",
    "exploration linear",
    "normalize_observation",
    "layer_norm",
    "dropout",
    "value_l2",
    "value popart",
    "replay priority",
    "hybrid",
    "cloning",
)
ALGOS = ("ppo", "grpo")
CRITIC = {"value_l2", "value running", "value popart"}  # need one
every_algo = pytest.mark.parametrize("algo", ALGOS)


def every(*links: str) -> list[tuple[str, ...]]:
    """Every algorithm with links that it can have."""
    return [(algo, *links) for algo in ALGOS if algo == "ppo" or not CRITIC & set(links)]


every_link = pytest.mark.parametrize(("algo", "link"), [pair for link in LINKS for pair in every(link)])


def together(*links: str) -> list[str]:
    """The overrides that switch several links on; their stabilisers are one list."""
    given = [override for link in links for override in LINKS[link][0]]
    names = [name for o in given if o.startswith("stabilizer=") for name in o[len("stabilizer=[") : -1].split(",")]
    rest = {o.split("=")[0]: o for o in given if not o.startswith("stabilizer=")}  # of two values of a key the second
    return [f"stabilizer=[{','.join(dict.fromkeys(names))}]", *rest.values()]


@pytest.mark.parametrize(
    ("algo", "link"), [pair for link, (_, off) in LINKS.items() if off is not None for pair in every(link)]
)
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
    names = ["entropy", "ref_kl exact", "replay", "hybrid", "cloning", *(["value_l2"] if algo == "ppo" else [])]
    for on in (LINKS[name][0] for name in names):
        assert not torch.equal(weights(train(small_learner(algo, "members=2", *on), 3)), weights(plain))


def test_law_1_a_zero_value_coefficient_trains_the_actor_as_without_the_link():
    zero = small_learner("ppo", "algo.value_coef=0")
    without = small_learner("ppo", "algo.value_coef=0")
    del without.chain.links["value"]
    assert torch.equal(weights(train(zero, 3)), weights(train(without, 3)))


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
    some = ("ref_kl exact", "reward_scale", "layer_norm", "dropout", "value_l2", "value popart", "replay", "hybrid")
    learner = train(small_learner("ppo", "members=3", *together(*some)), 1)
    state = learner.state_dict()

    def leaves(x):
        if isinstance(x, dict):
            for value in x.values():
                yield from leaves(value)
        else:  # a list has an entry for each member
            yield x

    shapes = [(len(leaf),) if isinstance(leaf, list) else tuple(leaf.shape) for leaf in leaves(state)]
    assert len(shapes) > 20
    assert all(shape[:1] == (3,) for shape in shapes), shapes


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


@pytest.mark.parametrize(
    ("algo", "first", "second"), [case for pair in itertools.combinations(PAIRED, 2) for case in every(*pair)]
)
def test_law_5_every_pair_runs_and_the_order_of_losses_is_rounding(algo, first, second):
    both = together(first, second)
    learner = train(small_learner(algo, "members=2", *both), 2)
    assert weights(learner).isfinite().all()
    turned = small_learner(algo, "members=2", *both)
    turned.chain.links = dict(sorted(reversed(turned.chain.links.items()), key=lambda entry: rows_change(entry[1])))
    torch.testing.assert_close(weights(train(turned, 2)), weights(learner), rtol=1e-4, atol=1e-5)


def rows_change(link: Link) -> int:
    """The place of a link whose order matters: rewards are scaled before rows are added, and what is left is losses."""
    return 0 if type(link).rollout is Link.rollout else 2 if link.adds_rows else 1


@every_link
def test_law_6_a_member_among_others_learns_as_alone(algo, link):
    among = train(small_learner(algo, "members=3", "seed=5", *LINKS[link][0]), 3)
    for m in range(3):
        alone = train(small_learner(algo, f"seed={5 + m}", *LINKS[link][0]), 3)
        assert among.env_steps[m] == alone.env_steps[0]
        torch.testing.assert_close(weights(among)[m], weights(alone)[0], rtol=1e-4, atol=1e-5)


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
