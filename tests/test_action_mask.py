"""Action masks: no illegal action, anywhere; exact ratios; gradients as by autograd; off and all-true are the same."""

import math
import re
import shlex

import gymnasium
import numpy as np
import pytest
import torch
from conftest import weights
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from omegaconf import OmegaConf

import rlkit
from rlkit.buffer import flatten
from rlkit.build import build_evaluator, build_learner, to_config
from rlkit.collect import MOST_NOISE, action_noise
from rlkit.conf.schema import ConfigError
from rlkit.distributions import FORBIDDEN, Categorical, forbidding
from rlkit.envs import EnvironmentFailure
from rlkit.envs.spaces import ActionSpec
from rlkit.gradient import reduce
from rlkit.keepers import checkpoint
from rlkit.optimizer import Adam
from rlkit.train import compose
from rlkit.update import Gradient

SIZE = 5


class Choosing(gymnasium.Env):
    """Allows other actions in each step, often only one, and refuses the rest; an ended episode allows none."""

    observation_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, space=None, allow="some", length=6):
        self.action_space = space or Discrete(SIZE, start=2)
        self.sizes = ActionSpec.of(self.action_space).sizes
        self.allow, self.length = allow, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.answer()

    def answer(self):
        masks = [self.np_random.random(size) < 0.3 for size in self.sizes]
        for mask in masks:
            mask[self.np_random.integers(len(mask))] = True
            if self.allow == "all":
                mask[:] = True
        self.masks = masks
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if self.allow == "nothing" or (self.allow == "no info" and self.time == 2):
            return obs, {}
        if self.allow == "none at step 3" and self.time == 3:
            return obs, {"action_mask": np.zeros(SIZE, np.int8)}
        if self.allow == "too few":
            return obs, {"action_mask": np.ones(2, np.int8)}
        if isinstance(self.action_space, Discrete):
            return obs, {"action_mask": masks[0].astype(np.int8), "other": self.time or "first"}
        return obs, {"action_mask": tuple(mask.astype(np.int8) for mask in masks)}

    def step(self, action):
        first = np.ravel(self.action_space.start)
        for mask, index in zip(self.masks, np.ravel(action) - first, strict=True):
            if not mask[index]:
                raise ValueError(f"{action} is illegal")
        self.time += 1
        obs, info = self.answer()
        ended = self.time == self.length
        return obs, float(self.np_random.normal()), ended, False, {"action_mask": np.zeros(SIZE)} if ended else info


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register("rlkit_tests/Choosing-v0", Choosing, max_episode_steps=6)


SMALL = {
    "ppo": ["algo=ppo", "num_envs=3", "algo.num_steps=16"],
    "grpo": ["algo=grpo", "num_envs=6", "algo.group_size=3"],
}
PLAIN = ["algo.num_epochs=2", "algo.num_minibatches=1", "policy.hidden=[8]", "members=2", "algo.entropy_coef=0.01"]


def config_of(algo, *overrides, masked=True):
    chosen = ["env=gym", "env.id=rlkit_tests/Choosing-v0", f"env.action_mask={str(masked).lower()}"]
    return to_config(compose([*chosen, *SMALL[algo], *PLAIN, *overrides])[0])


@pytest.fixture
def learner_of():
    made = []

    def make(algo, *overrides, masked=True):
        made.append(build_learner(config_of(algo, *overrides, masked=masked)))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


# --- the distribution ----------------------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_legal_actions_alone():
    """Logits log 1, log 2, log 3 without the second: 1/4 and 3/4."""
    logits = torch.tensor([0.0, math.log(2), math.log(3)])
    dist = Categorical(logits, (3,)).shifted(torch.from_numpy(forbidding(np.array([True, False, True]))))
    other = Categorical(torch.zeros(3), (3,)).shifted(torch.from_numpy(forbidding(np.array([True, False, True]))))
    assert dist.log_prob(torch.tensor([0])).item() == pytest.approx(math.log(1 / 4))
    assert dist.log_prob(torch.tensor([2])).item() == pytest.approx(math.log(3 / 4))
    assert dist.log_p[0].exp()[1] == 0
    assert dist.entropy().item() == pytest.approx(math.log(4) - 3 / 4 * math.log(3))
    assert dist.kl(other).item() == pytest.approx(1 / 4 * math.log(1 / 2) + 3 / 4 * math.log(3 / 2))
    assert other.kl(dist).item() == pytest.approx(1 / 2 * math.log(2) + 1 / 2 * math.log(2 / 3))


def test_nothing_pushes_the_logit_of_an_illegal_action():
    logits = torch.tensor([0.3, -0.2, 0.5, 80.0], requires_grad=True)
    offset = torch.from_numpy(forbidding(np.array([True, True, True, False])))
    dist = Categorical(logits, (4,)).shifted(offset)
    old = Categorical(torch.tensor([0.0, 1.0, 0.0, 0.0]), (4,)).shifted(offset)
    alone = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    small, small_old = Categorical(alone, (3,)), Categorical(torch.tensor([0.0, 1.0, 0.0]), (3,))
    for masked, unmasked in (
        (dist.log_prob(torch.tensor([1])), small.log_prob(torch.tensor([1]))),
        (dist.entropy(), small.entropy()),
        (dist.kl(old), small.kl(small_old)),
        (old.kl(dist), small_old.kl(small)),
    ):
        assert torch.equal(masked, unmasked)
        [by_masked] = torch.autograd.grad(masked, logits, retain_graph=True)
        [by_alone] = torch.autograd.grad(unmasked, alone, retain_graph=True)
        torch.testing.assert_close(by_masked[:3], by_alone)
        assert by_masked[3] == 0


class Zeros:
    """A generator whose exponential noise is always 0, whose Gumbel noise is therefore infinite."""

    def standard_exponential(self, shape, dtype):
        return np.zeros(shape, dtype)


def test_the_largest_noise_takes_no_illegal_action(learner_of):
    policy = learner_of("ppo", "members=1").policy
    noise = next(action_noise(policy, [Zeros()], 4))
    assert np.isfinite(noise).all()
    assert noise.max() == MOST_NOISE < -FORBIDDEN / 2
    mask = np.array([False, True, False, False, True])
    dist = Categorical(np.zeros((4, SIZE), np.float32), (SIZE,)).shifted(forbidding(mask))
    assert set(dist.sample(noise[0]).ravel()) == {1}


@pytest.mark.parametrize(
    ("space", "given", "mask"),
    [
        (Discrete(3, start=-1), [1, 0, 1], [True, False, True]),
        (MultiDiscrete([2, 3]), [1, 0, 0, 1, 1], [True, False, False, True, True]),
        (MultiDiscrete([2, 3]), ([1, 0], [0, 1, 1]), [True, False, False, True, True]),
        (MultiDiscrete([[1, 2]]), (([1], [0, 1]),), [True, False, True]),
    ],
    ids=str,
)
def test_masks_are_read_as_gymnasium_gives_them(space, given, mask):
    spec = ActionSpec.of(space)
    assert spec.mask(given).tolist() == mask
    arrays = tuple(np.array(x, np.int8) for x in given) if isinstance(given, tuple) and len(given) > 1 else given
    assert spec.mask(arrays).tolist() == mask


# --- collection and update -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("algo", SMALL)
def test_illegal_actions_are_never_taken(learner_of, algo, backend):
    learner = learner_of(algo, f"env.backend={backend}", "policy.log_std_init=0")
    for _ in range(3):
        learner.iterate()
    rollout = learner.collector.collect(learner.policy, 3, learner.running)
    taken = rollout.offset.gather(-1, rollout.action)[rollout.valid]
    assert taken.eq(0).all()
    assert rollout.offset[rollout.valid].eq(FORBIDDEN).float().mean() > 0.3
    assert weights(learner).isfinite().all()


def test_none_of_ten_thousand_samples_is_illegal(learner_of):
    learner = learner_of("ppo", "members=1", "num_envs=4", "algo.num_steps=2500")
    with torch.no_grad():
        learner.policy.actor.biases[-1][..., 0] = 5.0  # wants one action, legal or not
    rollout = learner.collector.collect(learner.policy, 0, learner.running)
    assert rollout.valid.sum() == 10_000
    assert rollout.offset.gather(-1, rollout.action).eq(0).all()
    assert len(rollout.action.unique()) == SIZE


def test_stored_log_probabilities_are_those_of_the_legal_actions(learner_of):
    learner = learner_of("ppo", "members=1")
    rollout = learner.collector.collect(learner.policy, 0, learner.running)
    logits = learner.policy.distribution(rollout.obs.transpose(0, 1).reshape(1, -1, 2)).logits
    legal = rollout.offset.eq(0).transpose(0, 1).reshape(1, -1, SIZE)
    action = rollout.action.transpose(0, 1).reshape(1, -1)
    stored = rollout.log_prob.transpose(0, 1).reshape(-1)
    for i in range(0, logits.shape[1], 5):
        alone = torch.distributions.Categorical(logits=logits[0, i, legal[0, i]])
        index = legal[0, i, : action[0, i]].sum()
        torch.testing.assert_close(stored[i], alone.log_prob(index))


@pytest.mark.parametrize("algo", SMALL)
def test_the_first_ratios_are_one_and_the_gradient_is_that_of_autograd(learner_of, algo):
    extra = ["stabilizer=[ref_kl,old_kl]", "algo.entropy_coef=0.1"]
    learner = learner_of(algo, *extra)
    learner.iterate()  # apart from the reference
    rollout = learner.chain.rollout(learner.collector.collect(learner.policy, 1, learner.running))
    batch = learner.chain.batch(flatten(learner.estimate(rollout)))
    out = learner.policy.evaluate(batch)
    ratio = (out.log_prob - batch.log_prob).exp()[batch.real]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)

    loss = reduce(learner.chain.losses(out, batch, learner.policy), batch, learner.chain.column)
    named = [p for p in learner.policy.parameters() if p.requires_grad]
    auto = torch.autograd.grad(loss.sum(), named, materialize_grads=True)
    optimizer = Adam(learner.policy)
    gradient = Gradient(learner.policy, learner.chain, optimizer)
    gradient(gradient.prepared(batch))
    for p, expected in zip(optimizer.params, auto, strict=True):
        torch.testing.assert_close(gradient.places[p], expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("algo", SMALL)
def test_a_mask_that_forbids_nothing_changes_no_bit(learner_of, algo):
    masked, plain = (learner_of(algo, "+env.kwargs.allow=all", masked=on) for on in (True, False))
    for learner in (masked, plain):
        for _ in range(3):
            learner.iterate()
    assert torch.equal(weights(masked), weights(plain))
    assert masked.metrics.keys() == plain.metrics.keys()
    for name, x in masked.metrics.items():
        assert torch.equal(x.nan_to_num(), plain.metrics[name].nan_to_num()), name


def test_the_entropy_is_of_the_legal_actions_alone(learner_of):
    learner = learner_of("ppo")
    learner.iterate()
    assert (learner.metrics["entropy/mean"] < 0.7 * math.log(SIZE)).all()
    assert (learner.metrics["entropy/mean"] > 0).all()


@pytest.mark.parametrize("algo", SMALL)
def test_masks_go_with_exploration_replay_and_late_copies(learner_of, algo):
    learner = learner_of(
        algo,
        "exploration.name=linear",
        "stabilizer=[replay,ref_kl]",
        "algo.sync_every=2",
        "env.normalize_observation=true",
        *(["algo.group_size=3", "num_envs=6"] if algo == "grpo" else []),
    )
    for _ in range(4):
        learner.iterate()
        assert learner.metrics["ratio/max"].isfinite().all()
    assert learner.metrics["replay/share"].gt(0).all()
    assert weights(learner).isfinite().all()


@pytest.mark.parametrize("groups", ["vine", "pilot"])
def test_branches_and_pilots_act_by_their_masks(learner_of, groups):
    learner = learner_of("grpo", f"algo.groups={groups}")
    for _ in range(4):
        learner.iterate()  # the environment raises at an illegal action
    assert weights(learner).isfinite().all()


def test_several_dimensions_have_a_mask_each(learner_of):
    space = MultiDiscrete([2, 3], start=[1, 0])
    gymnasium.registry["rlkit_tests/Choosing-v0"].kwargs["space"] = space
    learner = learner_of("ppo")
    for _ in range(3):
        learner.iterate()
    config = config_of("ppo")
    evaluator = build_evaluator(config, 8)
    assert evaluator(learner.policy, 8, stochastic=True).isfinite().all()
    evaluator.close()


# --- evaluation and agents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_evaluation_obeys_masks(learner_of, backend):
    learner = learner_of("ppo")
    evaluator = build_evaluator(config_of("ppo", f"env.backend={backend}"), 12)
    for stochastic in (False, True):
        assert evaluator(learner.policy, 12, stochastic).isfinite().all()
    evaluator.close()


def test_an_agent_obeys_the_mask_it_is_given(learner_of, tmp_path):
    learner = learner_of("ppo")
    (tmp_path / ".hydra").mkdir()
    raw = compose(["env=gym", "env.id=rlkit_tests/Choosing-v0", "env.action_mask=true", *SMALL["ppo"], *PLAIN])[0]
    OmegaConf.save(raw, tmp_path / ".hydra" / "config.yaml")
    about = {"env": "rlkit_tests/Choosing-v0", "algo": "ppo"}
    checkpoint.save(tmp_path / "checkpoint.pt", {"about": about, "learner": learner.state_dict()})
    agent = rlkit.load(tmp_path, member=1)
    env = gymnasium.make("rlkit_tests/Choosing-v0")
    obs, info = env.reset(seed=0)
    for t in range(40):
        ended = False
        while not ended:  # the environment raises at an illegal action
            action = agent.act(obs, deterministic=t % 2 == 0, action_mask=info["action_mask"])
            obs, _, ended, _, info = env.step(action)
        obs, info = env.reset()
    only = np.eye(SIZE, dtype=bool)
    assert agent.act(np.zeros((SIZE, 2), np.float32), action_mask=only).tolist() == [2, 3, 4, 5, 6]
    for mask, rows, sentence in (
        (None, 1, "action_mask is None; a run with env.action_mask=true must be given info['action_mask']"),
        ([1, 0], 1, "action_mask has 2 numbers; it must have 5, one for each action"),
        (np.zeros(5), 1, "action_mask forbids every action; it must allow one"),
        ([0, 0, -np.inf, 0, 0], 1, "action_mask[2] is -inf; it must be 1 where the action is legal, else 0"),
        (only[:2], 3, "action_mask has 2 rows; obs has 3, and there must be a mask for each"),
        (1, 2, "action_mask is 1; obs has 2, and there must be a mask for each"),
        ([only[0], [0] * 5], 2, "action_mask[1] forbids every action; it must allow one"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            agent.act([0, 0] if rows == 1 else np.zeros((rows, 2)), action_mask=mask)
    assert repr(agent).endswith("last checkpoint at 0 steps: obs [2], action_mask [5] -> Discrete(5, start=2))")


def test_the_command_that_a_run_ends_with_gives_the_agent_a_mask(tmp_path, capsys):
    settings = {"env": "gym", "env.id": "rlkit_tests/Choosing-v0", "env.action_mask": True, "algo": "ppo"}
    quick = {"num_envs": 2, "algo.num_steps": 16, "total_steps": 32, "eval.every": 0, "policy.hidden": [8]}
    rlkit.run(folder=tmp_path / "run", show="plain", **settings, **quick)
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    exec(command[command.index("-c") + 1])
    assert int(capsys.readouterr().out) in range(2, 2 + SIZE)


def test_taxi_drives_by_its_mask(learner_of):
    """Gymnasium's own masks, at reset and step."""
    chosen = ["env=gym", "env.id=Taxi-v4", "env.action_mask=true", *SMALL["ppo"], *PLAIN]
    learner = build_learner(to_config(compose(chosen)[0]))
    for _ in range(2):
        learner.iterate()
    rollout = learner.collector.collect(learner.policy, 2, learner.running)
    learner.close()
    env = gymnasium.make("Taxi-v4").unwrapped
    for obs, offset in zip(rollout.obs.flatten(0, 2), rollout.offset.flatten(0, 2), strict=True):
        assert offset.eq(0).tolist() == env.action_mask(int(obs.argmax())).astype(bool).tolist()


# --- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "sentence"),
    [
        (
            "no info",
            "gave no info['action_mask'] in step 2; with env.action_mask=true it must",
        ),
        (
            "none at step 3",
            "gave an action mask in step 3 that cannot be used: info['action_mask'] forbids every action; "
            "it must allow one",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_mask_that_is_no_mask_is_one_sentence(learner_of, backend, allow, sentence):
    with pytest.raises(EnvironmentFailure) as error:
        learner_of("ppo", f"env.backend={backend}", f"+env.kwargs.allow='{allow}'").iterate()
    assert str(error.value) == f"environment 0 of member 0 {sentence}"
    assert error.value.trace == ""


def test_an_environment_without_masks_is_refused_before_a_run_begins(learner_of):
    with pytest.raises(ConfigError, match=r"env\.action_mask is true; .*Choosing.* gives no info\["):
        learner_of("ppo", "+env.kwargs.allow=nothing")
    with pytest.raises(EnvironmentFailure) as error:
        learner_of("ppo", "+env.kwargs.allow='too few'")
    cause = "info['action_mask'] has 2 numbers; it must have 5, one for each action"
    assert str(error.value) == f"rlkit_tests/Choosing-v0 gave an action mask in reset that cannot be used: {cause}"


@pytest.mark.parametrize("space", [Box(-1, 1, (2,)), MultiBinary(2)], ids=str)
def test_other_actions_have_no_masks(learner_of, space):
    gymnasium.registry["rlkit_tests/Choosing-v0"].kwargs["space"] = space
    with pytest.raises(ConfigError, match=r"env\.action_mask is true; .* only actions of Discrete and MultiDiscrete"):
        learner_of("ppo")


def test_native_environments_have_no_masks():
    with pytest.raises(ConfigError, match=r"env\.action_mask is true; native environments give no masks"):
        build_learner(to_config(compose(["env=CartPole", "env.action_mask=true"])[0]))
