"""The process that goes through the critic: the same numbers to the last bit, and when it is there."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from rlkit.build import build_learner, to_config
from rlkit.conf.schema import Config
from rlkit.cores import critic_has_a_core
from rlkit.faults import Fault
from rlkit.job import use_threads
from rlkit.loop import Learner
from rlkit.mlp import StackedMLP
from rlkit.second_core import REST, SecondCore
from rlkit.train import compose

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process is forked on Linux alone")

# fmt: off
SMALL = [
    "env=CartPole", "algo=ppo", "tuned=none", "num_envs=8", "algo.num_steps=64", "algo.num_minibatches=2",
    "algo.num_epochs=2", "total_steps=100000", "policy.hidden=[16,16]",
]
# fmt: on


def config_of(*overrides: str) -> Config:
    return to_config(compose([*SMALL, *overrides])[0])


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_threads(1)  # as every run does: sums differ with their number


def state_after(learner: Learner, iterations: int = 3) -> list[torch.Tensor]:
    for _ in range(iterations):
        learner.iterate()
    learner.close()
    optimizer = learner.optimizer
    return [*(x.clone() for x in (optimizer.flat, optimizer.m, optimizer.v)), *learner.metrics.values()]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["members=3"],
        ["env=Pendulum", "env.normalize_observation=true", "policy.critic_hidden=[8]", "policy.activation=relu"],
        ["policy.layer_norm=true", "policy.value_normalization=popart", "policy.dropout=0.2"],
        ["num_envs=40", "algo.num_minibatches=1", "algo.num_steps=150"],  # a minibatch goes in pieces
        ["stabilizer=[ref_kl,replay]", "stabilizer.ref_kl.kind=k3"],  # rows of before, some links by autograd
        ["algo.value_coef=0"],
    ],
    ids=" ".join,
)
def test_the_numbers_are_those_of_one_process(two_cores, overrides):
    config = config_of(*overrides)
    learner = build_learner(config)
    assert learner.second is not None
    learner.second.ready = lambda: True  # however busy the other core is
    asked, ask = [], learner.second._ask
    learner.second._ask = lambda what, rows: (asked.append(what), ask(what, rows))
    both = state_after(learner)
    alone = build_learner(dataclasses.replace(config, processes=1))
    assert alone.second is None
    assert asked
    for one, two in zip(both, state_after(alone), strict=True):
        assert torch.equal(one.nan_to_num(-1.0), two.nan_to_num(-1.0))


def test_when_there_is_one(two_cores, monkeypatch):
    def has(*overrides: str) -> bool:
        return critic_has_a_core(config_of(*overrides))

    assert has() and has("processes=2") and has("members=7")
    assert not has("processes=1")
    assert not has("members=8")  # whose two processes use both cores
    assert not has("policy.shared_trunk=true")
    assert not has("algo.num_minibatches=4")  # 128 rows
    assert not critic_has_a_core(to_config(compose(["env=CartPole", "algo=grpo"])[0]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not has()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not has()


def second_core() -> tuple[StackedMLP, SecondCore]:
    network = StackedMLP([3, 8, 1], "tanh", 1.0, [torch.Generator().manual_seed(0)])
    return network, SecondCore(network, 40)


def test_without_a_backward_pass_no_gradient_is_written():
    network, second = second_core()
    places = [[torch.full_like(p, 7.0) for p in layer] for layer in network.layers]
    x = np.ones((1, 40, 3), np.float32)
    second.begin(x, moved=True)
    assert second.forward().shape == (1, 1, 40)
    second.fetch(places)
    assert all((place == 7.0).all() for layer in places for place in layer)
    second.begin(x, moved=True)
    second.forward()
    second.backward(np.ones((1, 1, 40), np.float32), more=False)
    second.fetch(places)
    assert places[-1][0].tolist() == [[[40.0]]]  # the bias of the output
    second.close()


def test_one_that_finds_its_core_busy_rests():
    _, second = second_core()
    second._waited, second._worked = 2.0, 1.0
    assert [second.ready() for _ in range(REST + 2)] == [False] * REST + [True] * 2
    second._waited, second._worked = 1.0, 2.0
    assert second.ready()
    second.close()


def test_close_ends_the_process_and_may_be_called_twice():
    _, second = second_core()
    process = second._process
    assert process.is_alive()
    second.close()
    second.close()
    assert process.exitcode == 0


def test_one_that_is_killed_is_a_sentence_not_a_hang():
    _, second = second_core()
    os.kill(second._process.pid, signal.SIGKILL)
    second.begin(np.ones((1, 40, 3), np.float32), moved=True)
    with pytest.raises(Fault, match="the process beside this one ended with status -9; processes=1 does without"):
        second.forward()
    second.close()


def test_it_ends_with_a_run_that_is_killed():
    script = (
        "import sys, time, torch; from rlkit.mlp import StackedMLP; from rlkit.second_core import SecondCore\n"
        "second = SecondCore(StackedMLP([3, 8, 1], 'tanh', 1.0, [torch.Generator()]), 40)\n"
        "print(second._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    number = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the process is still there")
