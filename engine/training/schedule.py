"""How training proceeds: how far it is, how fast it learns, how many passes it makes."""

import math
from dataclasses import dataclass

_FIRST_STEPS = 20
_LEAST_RATE = 0.02
"""Of the learning rate, what is left at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a training is told.

    Attributes:
        minutes: How long it may train, evaluations included; None for no limit.
        epochs: How often it may see the data; None for no limit. With both, what comes first ends it.
        learning_rate: The highest.
        warmup: Share of the training in which it rises to that.
        passes: Passes of an EAGLE head, or Medusa heads.
        pass_ramp: Share of the training after which a pass is added, starting from one.
        pass_share: Of its roots, how many a pass hands on to the next.
        noise: Width of the noise on features, see Sampling.
        batch_tokens: Roots that are computed at once.
        accumulate: Such batches for a step.
        clip: Longest gradient.
        weight_decay: Of AdamW.
        output_rate: Of the head's own output layer, as a share of the learning rate; 0 leaves it as it is.
        seed: Of the order of the data and of chance.
        max_length: Tokens of a piece of a sequence.
        eval_minutes: Between evaluations.
        eval_tokens: Roots that are evaluated.
        chain: Drafts of the chain that is evaluated.
    """

    minutes: float | None = None
    epochs: float | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.03
    passes: int = 3
    pass_ramp: float = 0.1
    pass_share: float = 0.5
    noise: float = 0.0
    batch_tokens: int = 1024
    accumulate: int = 1
    clip: float = 0.5
    weight_decay: float = 0.01
    output_rate: float = 1.0
    seed: int = 0
    max_length: int = 1024
    eval_minutes: float = 3.0
    eval_tokens: int = 8192
    chain: int = 4

    def progress(self, seconds: float, epochs: float) -> float:
        """How far it is, 1 at the end."""
        parts = [0.0]
        if self.minutes is not None:
            parts.append(seconds / 60 / self.minutes if self.minutes else 1.0)
        if self.epochs is not None:
            parts.append(epochs / self.epochs if self.epochs else 1.0)
        return min(1.0, max(parts))

    def rate(self, progress: float, step: int) -> float:
        """The learning rate: up in a line, down in a cosine."""
        rising = min(1.0, (step + 1) / _FIRST_STEPS, progress / self.warmup if self.warmup else 1.0)
        falling = 0.5 * (1 + math.cos(math.pi * progress))
        least = min(1.0, (step + 1) / _FIRST_STEPS) * _LEAST_RATE
        return self.learning_rate * max(least, rising * falling)

    def num_passes(self, progress: float) -> int:
        """One at first, then one more after the other."""
        if not self.pass_ramp:
            return self.passes
        return min(self.passes, 1 + int(progress / self.pass_ramp))
