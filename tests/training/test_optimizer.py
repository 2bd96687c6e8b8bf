"""What decays and what learns how fast; the schedule's course."""

import pytest
import torch
from torch import nn

from engine.training.optimizer import make_optimizer, set_rate
from engine.training.schedule import Schedule


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.lm_head = nn.Linear(2, 3, bias=False)


def moved(head: Small, output_rate: float) -> tuple[float, float, float]:
    """How far a step of rate 0.1 moves matrix, bias and output layer."""
    optimizer = make_optimizer(head, Schedule(output_rate=output_rate, weight_decay=0.0))
    set_rate(optimizer, 0.1)
    parts = (head.inner.weight, head.inner.bias, head.lm_head.weight)
    before = [part.detach().clone() for part in parts]
    head.lm_head(head.inner(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    far = [float((part.detach() - was).abs().max()) for part, was in zip(parts, before, strict=True)]
    return far[0], far[1], far[2]


@pytest.mark.parametrize(("output_rate", "expected"), [(1.0, 0.1), (0.1, 0.01), (0.0, 0.0)])
def test_an_output_layer_may_learn_slower(output_rate: float, expected: float) -> None:
    matrix, bias, output = moved(Small(), output_rate)
    # AdamW's first step is the rate for every weight.
    assert matrix == pytest.approx(0.1, rel=1e-3)
    assert bias == pytest.approx(0.1, rel=1e-3)
    assert output == pytest.approx(expected, rel=1e-3)


def test_only_matrices_decay() -> None:
    head = Small()
    optimizer = make_optimizer(head, Schedule(weight_decay=0.5))
    decays = {
        id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]
    }
    assert decays[id(head.inner.weight)] == 0.5
    assert decays[id(head.inner.bias)] == 0.0


def test_the_rate_rises_and_falls_and_passes_are_added() -> None:
    schedule = Schedule(minutes=10, learning_rate=1.0, warmup=0.1, passes=3, pass_ramp=0.2)
    rates = [schedule.rate(share / 100, 1000) for share in range(101)]
    assert rates.index(max(rates)) == 10
    assert rates[100] == pytest.approx(0.02)
    assert rates[5] == pytest.approx(0.5, rel=0.02)
    assert [schedule.num_passes(share) for share in (0.0, 0.19, 0.2, 0.41, 1.0)] == [1, 1, 2, 3, 3]


def test_what_comes_first_ends_a_training() -> None:
    schedule = Schedule(minutes=10, epochs=4)
    assert schedule.progress(60, 1) == 0.25
    assert schedule.progress(540, 1) == 0.9
    assert Schedule(epochs=0).progress(0, 0) == 1.0
