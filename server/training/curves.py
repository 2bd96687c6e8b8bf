"""The course of a training as a table and as a picture."""

import csv
import io
from collections.abc import Sequence
from typing import Protocol

from server.bench.chart import Chart, Series, draw_charts


class Evaluated(Protocol):
    """A head at some time of its training."""

    @property
    def step(self) -> int:
        """Steps so far."""

    @property
    def epoch(self) -> float:
        """Times it has seen the data."""

    @property
    def minutes(self) -> float:
        """It has been trained."""

    @property
    def learning_rate(self) -> float:
        """At that time."""

    @property
    def train_loss(self) -> tuple[float, ...]:
        """Per pass, since the last evaluation."""

    @property
    def held_out_loss(self) -> float:
        """Of first drafts."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance at each place of a chain, given that all before it were right."""

    @property
    def tokens_per_forward(self) -> float:
        """With that chain."""


def as_csv(history: Sequence[Evaluated]) -> str:
    """A line for each evaluation."""
    passes = max((len(row.train_loss) for row in history), default=0)
    places = max((len(row.rates) for row in history), default=0)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["minutes", "step", "epoch", "learning_rate", "held_out_loss"]
        + [f"train_loss_{place}" for place in range(1, passes + 1)]
        + [f"acceptance_{place}" for place in range(1, places + 1)]
        + ["tokens_per_forward"]
    )
    for row in history:
        losses = [f"{loss:.5f}" for loss in row.train_loss] + [""] * (passes - len(row.train_loss))
        writer.writerow(
            [
                f"{row.minutes:.2f}",
                row.step,
                f"{row.epoch:.3f}",
                f"{row.learning_rate:.3e}",
                f"{row.held_out_loss:.5f}",
            ]
            + losses
            + [f"{rate:.4f}" for rate in row.rates]
            + [f"{row.tokens_per_forward:.4f}"]
        )
    return file.getvalue()


def as_png(history: Sequence[Evaluated]) -> bytes:
    """Loss, acceptance and tokens per forward over the minutes."""
    passes = max((len(row.train_loss) for row in history), default=0)
    places = max((len(row.rates) for row in history), default=0)
    losses = [
        Series(
            f"draft {place + 1}, training",
            tuple((row.minutes, row.train_loss[place]) for row in history if len(row.train_loss) > place),
        )
        for place in range(passes)
    ]
    held_out = Series("draft 1, held out", tuple((row.minutes, row.held_out_loss) for row in history))
    rates = [
        Series(f"draft {place + 1}", tuple((row.minutes, row.rates[place]) for row in history))
        for place in range(places)
    ]
    tokens = Series("chain", tuple((row.minutes, row.tokens_per_forward) for row in history))
    return draw_charts(
        [
            Chart("cross-entropy, nats", "minutes", (held_out, *losses)),
            Chart("acceptance on held-out prompts, if all before were right", "minutes", tuple(rates)),
            Chart("tokens per forward, held-out prompts", "minutes", (tokens,), level=1.0),
        ]
    )
