"""Trainer: steps over cached features, evaluates now and then, and can be stopped and resumed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from engine.training.checkpoint import Checkpoint
from engine.training.features import Features
from engine.training.objective import Acceptance, Loss, Objective, total
from engine.training.optimizer import make_optimizer, set_rate
from engine.training.packing import Piece, cut, load_batch, packed, shuffled
from engine.training.passes import Sampling
from engine.training.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StepReport:
    """How far a training is.

    Attributes:
        step: Steps so far.
        epoch: Times it has seen the data.
        progress: Share of the training that is done.
        seconds: Time it has taken, those before an interruption included.
        seconds_left: An estimate; None before there is one.
        tokens_per_second: Roots per second, all passes of a root together.
        learning_rate: In this step.
        loss: Of this step, per pass.
        accuracy: Of this step, per pass.
    """

    step: int
    epoch: float
    progress: float
    seconds: float
    seconds_left: float | None
    tokens_per_second: float
    learning_rate: float
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a head can do at some time.

    Attributes:
        step: Steps so far.
        epoch: Times it has seen the data.
        minutes: It has been trained.
        learning_rate: At that time.
        train_loss: Mean per pass since the last evaluation, of the passes that all steps made.
        held_out_loss: Of first drafts on held-out prompts.
        rates: Acceptance at each place of a chain, given that all before it were right.
        tokens_per_forward: With that chain.
    """

    step: int
    epoch: float
    minutes: float
    learning_rate: float
    train_loss: tuple[float, ...]
    held_out_loss: float
    rates: tuple[float, ...]
    tokens_per_forward: float


class Listener(Protocol):
    """Who wants to know how it goes."""

    def on_step(self, report: StepReport) -> None:
        """After each step."""

    def on_evaluation(self, history: Sequence[Evaluation]) -> None:
        """After each evaluation; the latest is last. The head is as it was evaluated."""

    def on_best(self, evaluation: Evaluation) -> None:
        """The head has never been better."""


@dataclass(slots=True)
class _State:
    """Where a training is.

    Attributes:
        step, epoch, batch: Steps; whole epochs; batches of this epoch.
        num_pieces: Of the data; a training goes on with the next epoch if there are others.
        seconds: Trained so far.
        evaluated_at: Those at the last evaluation.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    num_pieces: int = 0
    seconds: float = 0.0
    evaluated_at: float = -math.inf


class Trainer:
    """Trains a head.

    Args:
        objective: What is made small.
        features: The data.
        schedule: How.
        checkpoint: Where it is kept between runs.
        clock: Seconds.
        listener: Told of everything.

    Attributes:
        history: All evaluations, those of earlier runs included.
    """

    def __init__(
        self,
        objective: Objective,
        features: Features,
        schedule: Schedule,
        checkpoint: Checkpoint,
        clock: Callable[[], float],
        listener: Listener,
    ) -> None:
        self._objective = objective
        self._features = features
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._clock = clock
        self._listener = listener
        self._head: nn.Module = objective.drafter.head
        self._device = next(self._head.parameters()).device
        self._optimizer = make_optimizer(self._head, schedule)
        self._generator = torch.Generator().manual_seed(schedule.seed)
        self._pieces = cut(features.train, schedule.max_length)
        self._held_out = held_out_pieces(features, schedule)
        self._state = _State()
        self._losses: list[tuple[float, ...]] = []
        self.history: list[Evaluation] = []

    def resume(self) -> bool:
        """Takes up where an earlier run stopped, if there was one."""
        kept = self._checkpoint.load()
        if kept is None:
            return False
        self._head.load_state_dict(kept["head"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._generator.set_state(kept["generator"])
        self._state = _State(**kept["state"])
        self._losses = [tuple(loss) for loss in kept["losses"]]
        self.history = [
            Evaluation(**{**row, "train_loss": tuple(row["train_loss"]), "rates": tuple(row["rates"])})
            for row in kept["history"]
        ]
        return True

    def run(self, stop: Callable[[], bool]) -> bool:
        """Trains to the end.

        Args:
            stop: Asked after each step whether to leave off; what was reached is kept.

        Returns:
            Whether the end was reached.
        """
        state = self._state
        if state.num_pieces and state.num_pieces != len(self._pieces):
            state.epoch, state.batch = state.epoch + 1, 0
        state.num_pieces = len(self._pieces)
        began = self._clock() - state.seconds
        while not self._is_done():
            batches = packed(
                shuffled(self._pieces, self._schedule.seed, state.epoch), self._schedule.batch_tokens
            )
            steps = -(-len(batches) // self._schedule.accumulate)
            while state.batch < steps and not self._is_done():
                first = state.batch * self._schedule.accumulate
                self._step(batches[first : first + self._schedule.accumulate], steps)
                state.seconds = self._clock() - began
                if state.seconds - max(0.0, state.evaluated_at) >= 60 * self._schedule.eval_minutes:
                    self._evaluate(began)
                if stop():
                    self._save()
                    return False
            if state.batch >= steps:
                state.epoch, state.batch = state.epoch + 1, 0
        if not self.history or self.history[-1].step != state.step:
            self._evaluate(began)
        return True

    def _is_done(self) -> bool:
        return self._schedule.progress(self._state.seconds, self._epochs()) >= 1.0

    def _epochs(self) -> float:
        batches = max(1, sum(piece.num_roots for piece in self._pieces) // self._schedule.batch_tokens)
        part = self._state.batch * self._schedule.accumulate / batches
        return self._state.epoch + min(1.0, part)

    def _step(self, batches: Sequence[Sequence[Piece]], steps: int) -> None:
        state, schedule = self._state, self._schedule
        began = self._clock()
        progress = schedule.progress(state.seconds, self._epochs())
        rate = schedule.rate(progress, state.step)
        set_rate(self._optimizer, rate)
        sampling = Sampling(schedule.pass_share, schedule.noise, self._generator)
        losses: list[Loss] = []
        roots = 0
        for pieces in batches:
            batch = load_batch(self._features, pieces).to(self._device)
            loss = self._objective.loss(batch, schedule.num_passes(progress), sampling)
            torch.autograd.backward(loss.total / len(batches))
            losses.append(loss)
            roots += len(batch.roots)
        nn.utils.clip_grad_norm_(self._head.parameters(), schedule.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.step += 1
        state.batch += 1
        self._losses.append(_means([loss.per_pass for loss in losses]))
        seconds = self._clock() - began
        left = (1 - progress) / progress * state.seconds if progress > 0 else None
        self._listener.on_step(
            StepReport(
                state.step,
                self._epochs(),
                progress,
                state.seconds + seconds,
                left,
                roots / max(seconds, 1e-9),
                rate,
                self._losses[-1],
                _means([loss.accuracy for loss in losses]),
            )
        )

    def _evaluate(self, began: float) -> None:
        state = self._state
        found = self._acceptance()
        state.seconds = state.evaluated_at = self._clock() - began
        evaluation = Evaluation(
            step=state.step,
            epoch=round(self._epochs(), 3),
            minutes=round(state.seconds / 60, 3),
            learning_rate=float(self._optimizer.param_groups[0]["lr"]),
            train_loss=_means(self._losses),
            held_out_loss=found.mean_loss,
            rates=found.rates,
            tokens_per_forward=found.tokens_per_forward,
        )
        self._losses = []
        is_best = all(evaluation.tokens_per_forward > other.tokens_per_forward for other in self.history)
        self.history.append(evaluation)
        if is_best:
            self._listener.on_best(evaluation)
        self._listener.on_evaluation(self.history)
        self._save()

    def _acceptance(self) -> Acceptance:
        batches = packed(self._held_out, self._schedule.batch_tokens)
        return total(
            self._objective.acceptance(
                load_batch(self._features, pieces).to(self._device), self._schedule.chain
            )
            for pieces in batches
        )

    def _save(self) -> None:
        self._checkpoint.save(
            self._head, self._optimizer, self._generator, self._state, self._losses, self.history
        )


def held_out_pieces(features: Features, schedule: Schedule) -> list[Piece]:
    """What is evaluated, the same in every run over the same data: whole pieces, evenly from all of them."""
    pieces, num_roots = cut(features.held_out, schedule.max_length), schedule.eval_tokens
    whole = sum(piece.num_roots for piece in pieces)
    if whole <= num_roots:
        return list(pieces)
    every = whole / num_roots
    return [piece for index, piece in enumerate(pieces) if int((index + 1) / every) > int(index / every)]


def _means(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Of each place over all rows that have it."""
    longest = max(map(len, rows), default=0)
    columns = [[row[place] for row in rows if len(row) > place] for place in range(longest)]
    return tuple(sum(column) / len(column) for column in columns)
