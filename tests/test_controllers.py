"""KL penalties and what moves their coefficients, on hand-computed numbers."""

from __future__ import annotations

import pytest
import torch
from conftest import small_learner, train, weights

from rlkit.conf.schema import ConfigError
from rlkit.controllers import Controller
from rlkit.losses import exact_kl
from rlkit.train import compose

ROWS = torch.tensor([100.0, 100.0, 100.0, 100.0])


def controller(rule: str, members: int = 4, **given) -> Controller:
    settings = {"coef": 0.4, "target": 0.01, "horizon": 1000, "final": 0.1, "low": 1e-3, "high": 10.0} | given
    return Controller(members=members, rule=rule, **settings)


@pytest.mark.parametrize(
    ("rule", "after"),
    [
        ("fixed", [0.4, 0.4, 0.4, 0.4]),
        ("adaptive", [0.8, 0.4, 0.2, 0.2]),  # above 0.015, between, below 0.00667, below
        ("stepped", [0.8, 0.4, 0.4, 0.2]),  # above 0.015, between, between, below 0.005
        ("proportional", [0.4 * 1.02, 0.4 * 1.01, 0.4 * 0.98, 0.4 * 0.98]),  # 100 rows of 1,000: a tenth of +-20 %
        ("linear", [0.325, 0.325, 0.325, 0.325]),  # a quarter of the way from 0.4 to 0.1
    ],
)
def test_each_rule_on_numbers(rule, after):
    moving = controller(rule)
    moving.move(torch.tensor([0.016, 0.011, 0.006, 0.001]), ROWS, torch.full((4,), 0.25))
    torch.testing.assert_close(moving.coef, torch.tensor(after))


@pytest.mark.parametrize("rule", ["adaptive", "stepped", "proportional"])
def test_a_coefficient_keeps_its_bounds_and_zero_and_a_member_without_kl(rule):
    moving = controller(rule, low=0.39, high=0.41, horizon=10)
    moving.coef = torch.tensor([0.4, 0.4, 0.0, 0.4])
    moving.move(torch.tensor([1.0, 0.0, 1.0, torch.nan]), ROWS, torch.zeros(4))
    torch.testing.assert_close(moving.coef, torch.tensor([0.41, 0.39, 0.0, 0.4]))


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_old_kl_penalty_is_the_exact_kl_times_the_coefficient(algo):
    learner = train(small_learner(algo, "members=2", "stabilizer=[old_kl]", "algo.learning_rate=0.01"), 1)
    link = learner.chain.links["old_kl"]
    link.controller.coef = torch.tensor([0.5, 3.0])
    seen = {}
    original = link.losses

    def spy(out, batch, policy):
        seen["batch"], seen["out"], seen["loss"] = batch, out, original(out, batch, policy)["loss"]
        return {"loss": seen["loss"]}

    link.losses = spy
    train(learner, 1)
    old = seen["out"].dist.with_params(seen["batch"].starting_with("old_"))
    p, q = (torch.distributions.Categorical(logits=d.params["logits"].detach()) for d in (old, seen["out"].dist))
    kl = torch.distributions.kl_divergence(p, q)
    assert kl.max() > 1e-5
    torch.testing.assert_close(seen["loss"].detach(), torch.tensor([[0.5], [3.0]]) * kl, rtol=1e-3, atol=1e-6)


def test_an_adaptive_coefficient_rises_while_kl_is_above_its_target_and_falls_below():
    high = train(small_learner("ppo", "stabilizer=[old_kl]", "stabilizer.old_kl.target=1e-9"), 3)
    low = train(small_learner("ppo", "stabilizer=[old_kl]", "stabilizer.old_kl.target=1e3"), 3)
    assert high.chain.links["old_kl"].controller.coef.tolist() == [8.0]
    assert low.chain.links["old_kl"].controller.coef.tolist() == [0.125]
    assert high.metrics["old_kl/coef"].tolist() == [8.0]  # logged


def test_the_kl_that_moves_ref_kl_is_that_of_the_batch_after_the_update():
    learner = small_learner("grpo", "members=2", "stabilizer=[ref_kl]", "stabilizer.ref_kl.controller=adaptive")
    link, seen = learner.chain.links["ref_kl"], {}

    def control(kl, count, metrics):
        seen["kl"] = kl

    def observe(batch, metrics, policy):
        original(batch, metrics, policy)
        now, ref = policy.distribution(batch.obs), link.reference.distribution(batch.obs)
        kl = exact_kl(now, ref)
        seen["wanted"] = torch.stack([kl[m, : batch.count[m]].mean() for m in range(2)])

    original, link.observe, link.control = link.observe, observe, control
    train(learner, 2)
    assert seen["kl"].min() > 0
    torch.testing.assert_close(seen["kl"], seen["wanted"])


def test_a_reference_follows_a_member_that_got_other_weights_and_no_other():
    learner = train(small_learner("grpo", "members=2", "stabilizer=[ref_kl]"), 2)
    link = learner.chain.links["ref_kl"]
    before = link.reference.actor.weights[0].clone()
    learner.chain.anchor(learner.policy, torch.tensor([False, True]))
    after = link.reference.actor.weights[0]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert torch.equal(after[1], learner.policy.actor.weights[0][1])


def test_a_run_can_be_the_reference(tmp_path):
    import rlkit

    settings = {"env": "CartPole", "algo": "ppo", "total_steps": 1024, "eval.episodes": 2, "policy.hidden": [8, 8]}
    run = rlkit.run(folder=tmp_path / "teacher", **settings)
    learner = small_learner("grpo", "members=2", "stabilizer=[ref_kl]", f"stabilizer.ref_kl.reference={run.folder}")
    agent = rlkit.load(run.folder)
    reference = learner.chain.links["ref_kl"].reference
    for m in range(2):
        assert torch.equal(reference.actor.weights[0][m], agent.policy.actor.weights[0][0])
    train(learner, 1)  # it stays, whatever the learner does
    learner.chain.anchor(learner.policy, torch.tensor([True, True]))
    assert torch.equal(reference.actor.weights[0][0], agent.policy.actor.weights[0][0])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["stabilizer.ref_kl.reference=nowhere"],
            "stabilizer.ref_kl: reference is nowhere: there is no run at nowhere",
        ),
        (["stabilizer.ref_kl.controller=pid"], "stabilizer.ref_kl.controller is pid; it must be one of fixed,"),
        (["stabilizer.ref_kl.target=0"], "stabilizer.ref_kl.target is 0; it must be > 0"),
        (
            ["stabilizer.ref_kl.min_coef=2.0", "stabilizer.ref_kl.max_coef=1.0"],
            "stabilizer.ref_kl: min_coef is 2.0 and max_coef is 1.0",
        ),
    ],
)
def test_what_a_penalty_cannot_be_is_a_sentence(overrides, words):
    with pytest.raises(ConfigError) as error:
        small_learner("grpo", "stabilizer=[ref_kl]", *overrides)
    assert str(error.value).startswith(words)


def test_policy_gradient_is_reinforce_with_a_baseline():
    """The preset's first gradient is that of -mean(A log pi), by autograd (Williams 1992)."""
    preset = compose(["experiment=policy_gradient", "algo=grpo"])[0].algo
    assert (preset.num_epochs, preset.num_minibatches, preset.clip) == (1, 1, None)
    one_step = ("experiment=policy_gradient", "algo.num_epochs=1", "algo.num_minibatches=1", "algo.max_grad_norm=null")
    learner = small_learner("grpo", *one_step)
    rollout = learner.estimate(learner.collector.collect(learner.policy, 0, learner.running))
    rows = rollout.valid.flatten()
    log_prob = torch.log_softmax(learner.policy.actor(rollout.obs.reshape(1, len(rows), -1)), -1)
    taken = log_prob[0].gather(-1, rollout.action.reshape(len(rows), 1).long())[:, 0]
    loss = -(rollout.advantage.flatten() * taken)[rows].mean()
    wanted = torch.autograd.grad(loss, [*learner.policy.parameters()])

    twin = small_learner("grpo", *one_step)
    before = weights(twin).clone()
    seen = []
    original = twin.optimizer.step

    def step(grads, learning_rate, active):
        seen.append(grads[0].clone())
        return original(grads, learning_rate, active)

    twin.optimizer.step = step
    train(twin, 1)
    [flat] = seen  # one step
    torch.testing.assert_close(flat, torch.cat([g.reshape(1, -1) for g in wanted], 1), rtol=1e-4, atol=1e-6)
    assert not torch.equal(weights(twin), before)
