"""From rollout to batch: which rows arrive, in what order, and what padding weighs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkit.buffer import Batch, Rollout, flatten, gather_rows, valid_rows

T, M, N = 3, 3, 2


def label() -> Tensor:
    """A number for each row that says where it stood: 100 (m + 1) + 10 t + n, [T, M, N]."""
    t, m, n = torch.meshgrid(torch.arange(T), torch.arange(M), torch.arange(N), indexing="ij")
    return (100 * (m + 1) + 10 * t + n).float()


# member 0 has every row, member 1 episodes of length 1 and 3, member 2 nothing
VALID = torch.ones(T, M, N, dtype=torch.bool)
VALID[1:, 1, 0] = False
VALID[:, 2] = False
ORDER = {0: [100, 101, 110, 111, 120, 121], 1: [200, 201, 211, 221], 2: []}


def rollout(valid: Tensor = VALID, value: bool = True) -> Rollout:
    x = label()
    return Rollout(
        obs=torch.stack([x, -x], -1),
        final_obs=torch.zeros(T, M, N, 2),
        action=x[..., None].long(),
        log_prob=x + 0.1,
        old={"mean": torch.stack([x, x + 0.2, x + 0.3], -1), "log_std": x[..., None]},
        reward=x,
        terminated=torch.zeros(T, M, N, dtype=torch.bool),
        truncated=torch.zeros(T, M, N, dtype=torch.bool),
        valid=valid,
        value=x + 0.4 if value else None,
        advantage=x + 0.5,
        ret=x + 0.6,
        weight=torch.full((T, M, N), 2.0),  # even where it should be zero
    )


def test_flatten_compacts_the_rows_of_each_member_in_order_of_time() -> None:
    batch = flatten(rollout())
    assert (batch.members, batch.height) == (M, 6)
    assert batch.count.tolist() == [6, 4, 0]
    assert batch.padded
    assert set(batch) == {
        *("obs", "action", "log_prob", "old_mean", "old_log_std", "advantage", "ret", "weight", "value")
    }
    for m, rows in ORDER.items():
        x = torch.tensor(rows, dtype=torch.float32)
        count = len(rows)
        assert torch.equal(batch.obs[m, :count], torch.stack([x, -x], -1))
        assert torch.equal(batch.action[m, :count, 0], x.long())
        assert torch.equal(batch.old_mean[m, :count], torch.stack([x, x + 0.2, x + 0.3], -1))
        assert torch.equal(batch.old_log_std[m, :count, 0], x)
        for name, shift in (("log_prob", 0.1), ("value", 0.4), ("advantage", 0.5), ("ret", 0.6)):
            assert torch.equal(batch[name][m, :count], x + shift), name
        assert batch.weight[m].tolist() == [2.0] * count + [0.0] * (6 - count)


def test_flatten_without_padding_or_critic() -> None:
    batch = flatten(rollout(torch.ones(T, M, N, dtype=torch.bool), value=False))
    assert not batch.padded and batch.count.tolist() == [6, 6, 6]
    assert "value" not in batch
    assert batch.ret[2].tolist() == pytest.approx([x + 200.6 for x in (100, 101, 110, 111, 120, 121)])


def test_flatten_of_a_rollout_without_any_row_still_has_one_of_weight_zero() -> None:
    batch = flatten(rollout(torch.zeros(T, M, N, dtype=torch.bool)))
    assert batch.count.tolist() == [0, 0, 0] and batch.height == 1
    assert not batch.weight.any()


@pytest.mark.parametrize("missing", ["advantage", "ret", "weight"])
def test_flatten_needs_the_estimates(missing: str) -> None:
    with pytest.raises(ValueError, match="estimate them first"):
        flatten(rollout().replace(**{missing: None}))


def test_rows_and_gather_agree_with_boolean_indexing() -> None:
    rng = torch.Generator().manual_seed(0)
    valid = torch.rand(7, 4, 5, generator=rng) < 0.4
    x = torch.randn(7, 4, 5, 2, generator=rng)
    rows, count = valid_rows(valid)
    gathered = gather_rows(x, rows)
    for m in range(4):
        assert torch.equal(gathered[m, : count[m]], x[:, m][valid[:, m]])


# --- batch --------------------------------------------------------------------------------------------------


def test_take_picks_rows_of_the_own_member() -> None:
    batch = flatten(rollout())
    rows = torch.tensor([[5, 0], [3, 3], [1, 2]])
    taken = batch.take(rows)
    assert (taken.members, taken.height) == (3, 2)
    for name, x in batch.items():
        for m in range(3):
            assert torch.equal(taken[name][m], x[m, rows[m]]), name
    taken["weight"].mul_(0.0)
    assert batch.weight.any()  # a copy, not a view


def test_slice() -> None:
    batch = flatten(rollout())
    first, part = batch.slices(3)
    assert first.height == part.height == 3 and part.padded == batch.padded
    assert set(part) == set(batch) and len(part) == len(batch)
    assert all(torch.equal(x, batch[name][:, 3:6]) for name, x in part.items())
    assert all(np.array_equal(part.array(name), batch[name][:, 3:6]) for name in batch)
    assert part.obs.data_ptr() == batch.obs[:, 3:].data_ptr() == part.array("obs").ctypes.data


def test_with_columns() -> None:
    batch = flatten(rollout())
    more = batch.with_columns(ref_logits=torch.ones(3, 6, 4), advantage=torch.zeros(3, 6))
    assert more.ref_logits.shape == (3, 6, 4) and not more.advantage.any()
    assert "ref_logits" not in batch and batch.advantage.any()
    assert torch.equal(more.count, batch.count) and more.padded == batch.padded
    for shape in ((3, 5), (2, 6), (6, 3), (3,)):
        with pytest.raises(ValueError, match="column extra"):
            batch.with_columns(extra=torch.zeros(shape))


def test_columns_by_name() -> None:
    batch = flatten(rollout())
    assert set(batch.starting_with("old_")) == {"mean", "log_std"}
    assert batch.starting_with("old_")["mean"] is batch.old_mean is batch["old_mean"]
    assert len(batch) == 9 and batch.get("nothing") is None
    with pytest.raises(AttributeError, match="nothing"):
        _ = batch.nothing
    assert isinstance(batch, Batch)
