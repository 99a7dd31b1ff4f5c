"""Demonstrations, the warm-up on them, and the decaying pull towards them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import demonstrations, small_learner, train, weights
from gymnasium.spaces import Box, Discrete

import rlkit
from rlkit.build import ConfigError
from rlkit.demonstrations import SOURCES, Demonstrations
from rlkit.envs.spaces import ActionSpec
from rlkit.gradient import Gradient
from rlkit.keepers.keeper import put
from rlkit.link import Chain, Link
from rlkit.optimizer import Adam
from rlkit.phases.warm_up import Likelihood, orders
from rlkit.policy import Policy
from rlkit.stabilizers.cloning import Cloning
from rlkit.streams import Purpose, Streams
from rlkit.train import compose, prepare

ALGOS = ("ppo", "grpo")
every_algo = pytest.mark.parametrize("algo", ALGOS)


def warm(path: object = None, **settings: object) -> list[str]:
    """Overrides that select the warm-up."""
    given = {"demonstrations": path or demonstrations(), **settings}
    return ["stabilizer=[warm_up]", *(f"stabilizer.warm_up.{key}={value}" for key, value in given.items())]


@pytest.fixture
def teacher(tmp_path):
    """2,000 states like CartPole's, in which a rule pushes to where the pole falls."""
    obs = np.random.default_rng(0).normal(size=(2000, 4)).astype(np.float32)
    action = (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)
    np.savez(tmp_path / "teacher.npz", obs=obs, action=action)
    return SimpleNamespace(path=tmp_path / "teacher.npz", obs=torch.from_numpy(obs), action=torch.from_numpy(action))


def two_actions(obs_size: int = 2, members: int = 1, **settings: Any) -> tuple[Policy, ActionSpec]:
    """A policy whose probabilities are the same everywhere: logits 0.4 and -0.2, so 0.645656 and 0.354344."""
    actions = ActionSpec.of(Discrete(2))
    policy = Policy(obs_size, actions, range(members), hidden=(3,), **settings)
    with torch.no_grad():
        policy.actor.weights[-1].zero_()
        policy.actor.biases[-1].copy_(torch.tensor([0.4, -0.2]))
    return policy, actions


@every_algo
@pytest.mark.parametrize("names", ["warm_up,ref_kl", "ref_kl,warm_up"])
def test_after_a_warm_up_the_reference_is_the_clone(algo, names):
    learner = small_learner(algo, *warm(share=0.01), f"stabilizer=[{names}]", "members=2")
    reference = learner.chain.links["ref_kl"].reference
    untrained = weights(learner).clone()
    learner.begin()
    assert not torch.equal(weights(learner), untrained)
    clone, held = learner.policy.state_dict(), reference.state_dict()
    assert all(torch.equal(clone[name], x) for name, x in held.items() if not name.startswith("critic."))
    before = {name: x.clone() for name, x in held.items()}
    learner.iterate()
    assert all(torch.equal(before[name], x) for name, x in reference.state_dict().items())


def three_steps(path: Any) -> str:
    np.savez(path, obs=np.eye(3, 2), action=[0, 0, 1])
    return str(path)


# --- the loss ------------------------------------------------------------------------------------------------------


def test_loss_and_gradient_at_hand_numbers(tmp_path):
    policy, actions = two_actions()
    steps = Demonstrations.load(three_steps(tmp_path / "a.npz"), policy, actions)
    # (2 x 0.437488 + 1.037488) / 3
    torch.testing.assert_close(steps.loss(policy), torch.tensor([0.637488], dtype=torch.float64), rtol=1e-5, atol=0)
    optimizer = Adam(policy)
    gradient = Gradient(policy, Chain(cloning=Likelihood()), optimizer)
    found = gradient(steps.batch(torch.arange(3)[None]))
    # d loss / d logit = share of the action under pi less its share in the data: 0.645656 - 2 / 3
    by_bias = gradient.places[policy.actor.biases[-1]]
    torch.testing.assert_close(by_bias.flatten(), torch.tensor([-0.021010, 0.021010]), rtol=1e-4, atol=0)
    terms = found.closed()
    torch.testing.assert_close(terms["cloning/loss"], torch.tensor([[0.437488, 0.437488, 1.037488]]), rtol=1e-5, atol=0)


def test_the_loss_of_continuous_actions_is_that_of_torch(tmp_path):
    rng = np.random.default_rng(2)
    np.savez(tmp_path / "a.npz", obs=rng.normal(size=(5000, 3)), action=rng.uniform(-2, 2, (5000, 2)))  # two pieces
    policy = Policy(3, ActionSpec.of(Box(-2.0, 2.0, (2,))), [1, 2], hidden=(4,), log_std_init=-0.3)
    steps = Demonstrations.load(str(tmp_path / "a.npz"), policy, ActionSpec.of(Box(-2.0, 2.0, (2,))))
    dist = policy.distribution(steps.obs.expand(2, -1, -1))
    normal = torch.distributions.Normal(dist.params["mean"], dist.params["log_std"].exp())
    expected = -normal.log_prob(steps.action).sum(-1).mean(1)
    torch.testing.assert_close(steps.loss(policy).float(), expected, rtol=1e-5, atol=1e-6)


def test_members_go_through_the_rows_in_orders_of_their_own():
    found = orders(Streams([4, 5]).open(Purpose.WARM_UP, 0), 10, 3)
    passes = [torch.cat([next(found) for _ in range(3)], 1) for _ in range(2)]  # [M, 9] each
    assert all(len(set(row.tolist())) == 9 for rows in passes for row in rows)
    assert not torch.equal(passes[0][0], passes[0][1]) and not torch.equal(passes[0], passes[1])
    alone = orders(Streams([5]).open(Purpose.WARM_UP, 0), 10, 3)
    assert torch.equal(next(alone)[0], passes[0][1, :3])
    assert sorted(next(orders(Streams([4]).open(Purpose.WARM_UP, 0), 10, 99))[0].tolist()) == list(range(10))


# --- the warm-up ---------------------------------------------------------------------------------------------------


@every_algo
def test_a_clone_does_what_its_teacher_does(algo, teacher):
    learner = small_learner(algo, "members=3", *warm(teacher.path, learning_rate=0.01, share=0.03))
    mode = learner.policy.distribution(teacher.obs.expand(3, -1, -1)).mode()[..., 0]
    assert ((mode == teacher.action).float().mean(1) < 0.9).all()
    events = learner.begin()
    mode = learner.policy.distribution(teacher.obs.expand(3, -1, -1)).mode()[..., 0]
    assert ((mode == teacher.action).float().mean(1) > 0.95).all()
    assert [member for member, _ in events] == [0, 1, 2]
    updates = learner.phases["warm_up"].updates
    assert all(text.startswith(f"cloned 2,000 demonstration steps in {updates:,} updates: ") for _, text in events)
    before, after = (float(x) for x in events[0][1].split("loss ")[1].split(" to "))
    assert before == pytest.approx(math.log(2), abs=0.02) and after < 0.3
    assert learner.env_steps.tolist() == [0, 0, 0]


@every_algo
def test_a_share_of_zero_changes_no_bit(algo):
    plain = small_learner(algo, "members=2", "env.normalize_observation=true")
    zero = small_learner(algo, "members=2", "env.normalize_observation=true", *warm(share=0))
    assert zero.begin() == []
    assert torch.equal(weights(zero), weights(plain))
    assert not zero.policy.normalizer.count.any()
    assert torch.equal(weights(train(zero, 2)), weights(train(plain, 2)))


@every_algo
def test_the_warm_up_changes_the_actor_and_not_the_critic_and_leaves_a_fresh_optimizer(algo):
    learner = small_learner(algo, "members=2", *warm(share=0.001))
    fresh = small_learner(algo, "members=2")
    learner.begin()
    assert not torch.equal(learner.policy.actor.weights[0], fresh.policy.actor.weights[0])
    if algo == "ppo":
        for p, q in zip(learner.policy.critic.parameters(), fresh.policy.critic.parameters(), strict=True):
            assert torch.equal(p, q)
    state, expected = learner.optimizer.state_dict(), fresh.optimizer.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@every_algo
def test_a_member_among_others_is_warmed_up_as_alone(algo):
    overrides = ["env.normalize_observation=true", *warm(share=0.002, batch_size=32)]
    together = small_learner(algo, "members=3", "seed=5", *overrides)
    told = together.begin()
    for m in range(3):
        alone = small_learner(algo, f"seed={5 + m}", *overrides)
        assert alone.begin()[0][1] == told[m][1]
        torch.testing.assert_close(weights(together)[m], weights(alone)[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights(together)[0], weights(together)[1])


@every_algo
def test_save_load_and_one_more_update_is_bit_identical(algo, tmp_path):
    overrides = ["members=2", "env.normalize_observation=true", *warm(share=0.001)]
    whole = small_learner(algo, *overrides)
    whole.begin()
    for iterations in (0, 1):
        train(whole, iterations)
        torch.save(whole.state_dict(), tmp_path / "state.pt")
        resumed = small_learner(algo, *overrides)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        if iterations:
            assert resumed.begin() == []  # the first iteration is behind it
        train(whole, 1)
        train(resumed, 1)
        assert torch.equal(weights(resumed), weights(whole))


def test_the_normaliser_gets_the_statistics_of_the_demonstrations():
    learner = small_learner("ppo", "members=2", "env.normalize_observation=true", *warm(share=0.001))
    learner.begin()
    obs = learner.phases["warm_up"].demonstrations.obs.double()
    normalizer = learner.policy.normalizer
    for m in range(2):
        torch.testing.assert_close(normalizer.mean[m], obs.mean(0))
        torch.testing.assert_close(normalizer.var[m], obs.var(0, unbiased=False))
    assert normalizer.count.tolist() == [300, 300]


def test_the_chain_hears_of_the_warmed_up_policy():
    learner = small_learner("ppo", "members=2", *warm(share=0.001))
    heard = []

    class Listener(Link):
        def anchor(self, policy, members):
            heard.append((weights(learner).clone(), members.tolist()))

    learner.chain.links["listener"] = Listener()
    learner.begin()
    [(seen, members)] = heard
    assert torch.equal(seen, weights(learner)) and members == [True, True]


def test_the_number_of_updates_is_a_share_of_the_planned_ones(tmp_path):
    ppo = ["num_envs=4", "algo.num_steps=8", "algo.num_epochs=3", "algo.num_minibatches=2", "total_steps=1000"]
    updates = lambda algo, *overrides: small_learner(algo, *overrides).phases["warm_up"].updates  # noqa: E731
    assert updates("ppo", *ppo, *warm()) == 19  # a tenth of 32 iterations x 3 x 2 = 192
    assert updates("ppo", *ppo, *warm(share=1)) == 192
    assert updates("ppo", *ppo, *warm(share=0.0001)) == 1
    assert updates("ppo", *ppo, *warm(share=0)) == 0
    grpo = ["num_envs=6", "algo.group_size=3", "algo.num_epochs=3", "algo.num_minibatches=2", "total_steps=1000"]
    steps = {"observations": np.zeros((30, 4)), "actions": np.zeros(30, int)}
    terminals, timeouts = np.zeros((2, 30), bool)
    terminals[[4, 9]] = timeouts[19] = True  # and an episode that is cut off: 7.5 steps, so 45 rows and 23 iterations
    np.savez(tmp_path / "told.npz", **steps, terminals=terminals, timeouts=timeouts)
    assert updates("grpo", *grpo, *warm(tmp_path / "told.npz", share=1)) == 23 * 6
    np.savez(tmp_path / "untold.npz", **steps)  # 30 rows are an episode at most: 180 rows, 6 iterations
    assert updates("grpo", *grpo, *warm(tmp_path / "untold.npz", share=1)) == 6 * 6
    limited = [*grpo, "algo.max_episode_steps=10"]  # 60 rows, 17 iterations
    assert updates("grpo", *limited, *warm(tmp_path / "untold.npz", share=1)) == 17 * 6


def test_the_learning_rate_is_that_of_the_run_unless_given():
    assert small_learner("ppo", "algo.learning_rate=0.007", *warm()).phases["warm_up"].learning_rate == 0.007
    assert small_learner("ppo", *warm(learning_rate=0.5)).phases["warm_up"].learning_rate == 0.5


# --- where demonstrations come from --------------------------------------------------------------------------------


def test_a_file_holds_environment_actions_and_a_batch_raw_ones(tmp_path):
    actions = ActionSpec.of(Box(np.array([0.0], np.float32), np.array([5.0], np.float32)))
    np.savez(tmp_path / "a.npz", obs=np.zeros((3, 1, 2)), actions=[[2.5], [3.75], [5.0]])
    raw = {
        squash: Demonstrations.load(str(tmp_path / "a.npz"), Policy(2, actions, [0], squash=squash), actions)
        for squash in (False, True)
    }
    assert raw[False].action.tolist() == [[2.5], [3.75], [5.0]]
    torch.testing.assert_close(raw[True].action, torch.tensor([[0.0], [0.549306], [7.2543]]), rtol=1e-4, atol=1e-6)
    assert (raw[True].obs.shape, raw[True].obs.dtype, raw[True].action.dtype) == ((3, 2), torch.float32, torch.float32)
    batch = raw[False].batch(torch.tensor([[0, 2], [1, 1]]))
    assert batch.action.tolist() == [[[2.5], [5.0]], [[3.75], [3.75]]]
    assert batch.weight.tolist() == [[1, 1], [1, 1]] and batch.obs.shape == (2, 2, 2)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "teacher"
    rlkit.run(folder=folder, algo="ppo", tuned="none", total_steps=256, num_envs=4, algo__num_steps=32, members=2)
    return folder


def test_the_best_member_of_a_run_plays_whole_episodes(run_folder):
    learner = small_learner("grpo", *warm(run_folder, episodes=7, share=0.001))
    steps = learner.phases["warm_up"].demonstrations
    action = rlkit.load(run_folder).act(steps.obs.numpy())
    assert np.array_equal(steps.action[:, 0].numpy(), action)
    starts = (steps.obs.abs() <= 0.05).all(1)  # CartPole's start states, and hardly another
    assert int(starts[:7].sum()) == 7 and len({tuple(row) for row in steps.obs[:7].tolist()}) == 7
    assert steps.mean_length == len(steps) / 7
    again = small_learner("ppo", "seed=9", *warm(run_folder, episodes=7)).phases["warm_up"].demonstrations
    assert torch.equal(again.obs, steps.obs)
    assert learner.env_steps.tolist() == [0]
    [(_, told)] = learner.begin()
    assert told.startswith(f"cloned {len(steps):,} demonstration steps")


def test_a_teacher_with_more_episodes_than_lanes(run_folder, monkeypatch):
    monkeypatch.setattr("rlkit.build.EVALUATION_LANES", 3)
    few = small_learner("ppo", *warm(run_folder, episodes=7)).phases["warm_up"].demonstrations
    monkeypatch.undo()
    all_at_once = small_learner("ppo", *warm(run_folder, episodes=7)).phases["warm_up"].demonstrations
    assert sorted(few.obs.tolist()) == sorted(all_at_once.obs.tolist())


@dataclass
class Episode:
    """What Minari documents of an episode: one observation more than actions."""

    observations: Any
    actions: Any


@pytest.fixture
def minari(monkeypatch):
    """A stand-in with Minari's documented functions, and the data sets it knows."""
    known: dict[str, list[Episode]] = {}

    def load_dataset(id: str) -> Any:
        if id not in known:
            raise FileNotFoundError(f"{id} not found")
        return SimpleNamespace(iterate_episodes=lambda: iter(known[id]))

    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(load_dataset=load_dataset))
    return known


def test_a_minari_data_set(minari):
    minari["cartpole/made-up-v0"] = [
        Episode(np.arange(12.0).reshape(3, 4), np.array([1, 0])),
        Episode(np.arange(100.0, 116.0).reshape(4, 4), np.array([0, 0, 1])),
    ]
    learner = small_learner("ppo", *warm("minari:cartpole/made-up-v0", share=0.001))
    steps = learner.phases["warm_up"].demonstrations
    assert steps.obs[:, 0].tolist() == [0, 4, 100, 104, 108]  # without the observations that episodes ended with
    assert steps.action.tolist() == [[1], [0], [0], [0], [1]]
    assert steps.mean_length == 2.5


# --- mistakes ------------------------------------------------------------------------------------------------------

FILES: dict[str, dict[str, Any]] = {
    "no_actions": {"obs": np.zeros((2, 4)), "act": [0, 1]},
    "nothing": {},
    "too_wide": {"obs": np.zeros((2, 6)), "action": [0, 1]},
    "unequal": {"obs": np.zeros((2, 4)), "action": [0, 1, 1]},
    "third_action": {"obs": np.zeros((2, 4)), "action": [0, 2]},
    "two_heads": {"obs": np.zeros((2, 4)), "action": [[0, 1], [1, 1]]},
    "nan": {"obs": np.full((2, 4), np.nan), "action": [0, 1]},
    "nan_action": {"obs": np.zeros((2, 4)), "action": [0, np.nan]},
    "words": {"obs": np.array([["a"] * 4] * 2), "action": [0, 1]},
    "objects": {"obs": np.array([{}, {}]), "action": [0, 1]},
    "empty": {"obs": np.zeros((0, 4)), "action": np.zeros(0, int)},
    "short_end": {"obs": np.zeros((2, 4)), "action": [0, 1], "terminated": [True]},
}
MISTAKES = [
    ("no_actions.npz", "it has no array action or actions, only obs, act"),
    ("nothing.npz", "it has no array obs or observations, only none"),
    ("too_wide.npz", "its observations have 6 numbers, those of the environment 4"),
    ("unequal.npz", "it has 2 observations and 3 actions"),
    ("third_action.npz", "the action of row 1 is [2], which is outside of Discrete(2)"),
    ("two_heads.npz", "the actions are of shape (2, 2) and type int64; an action of Discrete(2) is 1 numbers a row"),
    ("nan.npz", "the observation of row 0 is not finite"),
    ("nan_action.npz", "the action of row 1 is [nan], which is outside of Discrete(2)"),
    ("words.npz", "its observations are of type <U1; they must be numbers"),
    ("objects.npz", "it is not an NPZ file of plain arrays that can be read"),
    ("empty.npz", "it has no rows"),
    ("short_end.npz", "it has 2 actions, but terminated, terminals, truncated, timeouts are not all as long"),
    ("absent.npz", f"there is no such file or folder; it must be {SOURCES}"),
    ("text.npz", "it is not an NPZ file of plain arrays that can be read"),
    ("array.npy", "it is not an NPZ file of plain arrays that can be read"),
    ("folder", "it is not the folder of a finished run: it holds no summary.json"),
    ("half", "there is no run at {path}: {path}/.hydra/config.yaml does not exist"),
    ("minari:none", "there is no such data set on this machine; `minari download none` fetches it"),
    ("minari:empty", "it has no rows"),
    ("minari:dicts", "its observations or actions are not plain arrays"),
]


@pytest.mark.parametrize("name", ["warm_up", "cloning"])
@pytest.mark.parametrize(("source", "words"), MISTAKES, ids=[source for source, _ in MISTAKES])
def test_what_cannot_be_imitated_is_one_sentence(tmp_path, minari, name, source, words):
    minari |= {"empty": [], "dicts": [Episode({"a": np.zeros((2, 4))}, np.zeros(1, int))]}
    if source.removesuffix(".npz") in FILES:
        np.savez(tmp_path / source, **FILES[source.removesuffix(".npz")])
    (tmp_path / "text.npz").write_text("obs, action")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "folder").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "summary.json").write_text("{}")
    path = source if source.startswith("minari:") else tmp_path / source
    with pytest.raises(ConfigError) as error:
        prepare(compose([f"stabilizer=[{name}]", f"stabilizer.{name}.demonstrations={path}"])[0])
    assert str(error.value) == f"stabilizer.{name}: demonstrations is {path}; {words.format(path=path)}"


def test_a_run_in_another_environment_is_refused(run_folder):
    with pytest.raises(ConfigError, match="its observations have 4 numbers, those of the environment 6"):
        prepare(compose(["env=Acrobot", *warm(run_folder, episodes=1)])[0])


def test_without_minari_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigError, match=r"demonstrations is minari:x; .* pip install 'minari\[hdf5\]'"):
        prepare(compose(warm("minari:x"))[0])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stabilizer=[warm_up]"], "stabilizer.warm_up: demonstrations must be given: an NPZ file"),
        (["stabilizer=[cloning]"], "stabilizer.cloning: demonstrations must be given: an NPZ file"),
        (warm(share=1.5), "stabilizer.warm_up.share is 1.5; it must be >= 0 and <= 1"),
        (warm(batch_size=0), "stabilizer.warm_up.batch_size is 0; it must be >= 1"),
        (warm(episodes=0), "stabilizer.warm_up.episodes is 0; it must be >= 1"),
        (warm(learning_rate=0), "stabilizer.warm_up.learning_rate is 0; it must be > 0"),
        (warm(learning_rate="fast"), "stabilizer.warm_up.learning_rate is 'fast'; it must be of type float"),
        (["stabilizer=[cloning]", "stabilizer.cloning.decay=0"], "stabilizer.cloning.decay is 0; it must be > 0"),
        (["stabilizer=[cloning]", "stabilizer.cloning.coef=-1"], "stabilizer.cloning.coef is -1; it must be >= 0"),
    ],
)
def test_settings_out_of_range_are_one_sentence(overrides, words):
    with pytest.raises(ConfigError) as error:
        prepare(compose(overrides)[0])
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


# --- the decaying pull ---------------------------------------------------------------------------------------------


def an_iteration(link: Cloning, policy: Policy) -> dict[str, torch.Tensor]:
    """The loss terms of one iteration."""
    batch = link.batch(object())  # type: ignore[arg-type]
    found = link.losses(None, batch, policy)  # type: ignore[arg-type]
    link.observe(batch, {}, policy)
    return found


def test_the_pull_at_hand_numbers(tmp_path):
    policy, actions = two_actions(members=2)
    np.savez(tmp_path / "a.npz", obs=np.eye(3, 2), action=[1, 1, 1])
    link = Cloning(policy, Streams([0, 1]), actions, str(tmp_path / "a.npz"), coef=0.1, decay=0.5, batch_size=4)
    for expected in (0.1037488, 0.0518744, 0.0259372):  # -log 0.354344 = 1.037488
        found = an_iteration(link, policy)
        torch.testing.assert_close(found["loss"], torch.full((2,), expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(link.report()["coef"], torch.tensor([0.025, 0.025]))


def test_each_member_draws_new_demonstrations_each_iteration():
    policy, actions = two_actions(4, members=2)
    link = Cloning(policy, Streams([3, 4]), actions, demonstrations(), batch_size=50)
    drawn = []
    for _ in range(2):
        an_iteration(link, policy)
        drawn.append(link.drawn.obs)  # [M, b, D]
    assert drawn[0].shape == (2, 50, 4)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0][0], drawn[0][1])
    alone, _ = two_actions(4)
    other = Cloning(alone, Streams([4]), actions, demonstrations(), batch_size=50)
    an_iteration(other, alone)
    assert torch.equal(other.drawn.obs[0], drawn[0][1])


def test_a_pull_that_has_decayed_costs_nothing():
    policy, actions = two_actions(4)
    link = Cloning(policy, Streams([3]), actions, demonstrations(), coef=0.1, decay=1e-3)
    terms = [an_iteration(link, policy) for _ in range(4)]  # 1, 1e-3, 1e-6, 1e-9
    assert [sorted(term) for term in terms] == [["loss"], ["loss"], ["loss"], []]
    assert link.gradients(None, None) == {} and link.drawn is None  # type: ignore[arg-type]
    assert link.report()["coef"].tolist() == [0]


def test_a_member_that_is_rolled_back_is_pulled_as_it_was_then():
    policy, actions = two_actions(4, members=2)
    link = Cloning(policy, Streams([3, 4]), actions, demonstrations(), coef=1.0, decay=0.5)
    terms, then = [], {}
    for k in range(3):
        if k == 1:
            then = {name: x.clone() for name, x in link.state_dict().items()}
        terms.append(an_iteration(link, policy)["loss"])
    state = link.state_dict()
    put(state, then, torch.tensor([False, True]))
    link.load_state_dict(state)
    again = an_iteration(link, policy)["loss"]
    assert again[1] == terms[1][1]
    assert link.current.tolist() == [0.125, 0.5]


def test_the_pull_turns_a_policy_towards_its_teacher(teacher):
    pull = ["stabilizer=[cloning]", f"stabilizer.cloning.demonstrations={teacher.path}", "stabilizer.cloning.coef=10"]
    for algo in ALGOS:
        agreement = []
        for overrides in ([], pull):
            learner = train(small_learner(algo, "algo.learning_rate=0.01", "algo.num_epochs=10", *overrides), 3)
            mode = learner.policy.distribution(teacher.obs[None]).mode()[0, :, 0]
            agreement.append(float((mode == teacher.action).float().mean()))
        assert agreement[1] > 0.9 > agreement[0]


def test_demonstrations_are_normalised_as_the_policy_does_it():
    pull = ["stabilizer=[cloning]", f"stabilizer.cloning.demonstrations={demonstrations()}"]
    learner = train(small_learner("ppo", "env.normalize_observation=true", *pull), 2)
    link, policy = learner.chain.links["cloning"], learner.policy
    found = link.losses(None, None, policy)["loss"]
    obs = (link.drawn.obs - policy.normalizer.mean.float()) / (policy.normalizer.var.float() + 1e-8).sqrt()
    logits = policy.actor(obs.clamp(-10, 10))
    expected = torch.nn.functional.cross_entropy(logits[0], link.drawn.action[0, :, 0])
    torch.testing.assert_close(found, link.current * expected, rtol=1e-4, atol=1e-6)


def test_streams_open_at_an_index_of_each_member():
    streams = Streams([3, 4])
    mixed = [rng.random() for rng in streams.open(Purpose.CLONING, [7, 9])]
    assert mixed == [streams.open(Purpose.CLONING, 7)[0].random(), streams.open(Purpose.CLONING, 9)[1].random()]
