"""Random numbers that come in as an argument: a counter hash, never a stateful generator.

A number depends on nothing but its key (seed, choice, output position, token id, stream). It does not matter
how many numbers were drawn before it, for whom, in which batch or on which device, so a preemption, a
neighbour or a longer draft cannot change it.

The hash is SplitMix64 (Steele, Lea, Flood 2014): the key of a row is mixed on the host from Python ints and
is the start of a SplitMix64 sequence whose n-th number belongs to token id n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from engine.sampling.uploading import upload

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB

# 52 of the hash's bits, and a half on top, are exact in float64: with 53 the largest would round to 1.
_UNIFORM_BITS = 52
_HALF_STEP = 2.0**-53
_BITS_OF_ONE = 0x3FF0000000000000


class Stream(IntEnum):
    """What a random number is for; numbers of different streams are independent.

    TARGET: the target's choice of a token, and the draws of a draft that is coupled to it.
    DRAFT: the draws of a draft that is verified by the ratio rule.
    ACCEPT: the ratio rule's coin.
    RESIDUAL: the ratio rule's draw after a rejection.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which row of noise.

    Attributes:
        seed: The request's seed, any signed 64-bit integer.
        choice: Which of the answers to one prompt.
        position: The output position: index of the token to be chosen in the whole sequence, prompt
            included, so that neither preemption nor batching nor the length of a draft changes it.
        stream: What the noise is for.
    """

    seed: int
    choice: int
    position: int
    stream: Stream

    def mixed(self) -> int:
        """The row's place among all SplitMix64 sequences, an unsigned 64-bit integer."""
        state = 0
        for value in (self.seed, self.choice, self.position, self.stream):
            state = _mix((state + _STEP + value) & _MASK)
        return state


def uniform(keys: Sequence[NoiseKey]) -> list[float]:
    """One float64 strictly between 0 and 1 per key."""
    words = [_mix((key.mixed() + _STEP) & _MASK) >> (64 - _UNIFORM_BITS) for key in keys]
    return [word * 2.0**-_UNIFORM_BITS + _HALF_STEP for word in words]


def noise_starts(keys: Sequence[NoiseKey], device: torch.device) -> torch.Tensor:
    """Where the SplitMix64 sequence of each key begins: int64 [len(keys)], to be read as unsigned."""
    return upload([noise_start(key) for key in keys], torch.int64, device)


def noise_start(key: NoiseKey) -> int:
    """Where the SplitMix64 sequence of a key begins, as a signed 64-bit integer."""
    return _signed(key.mixed())


def uniform_rows(keys: Sequence[NoiseKey], vocab_size: int, device: torch.device) -> torch.Tensor:
    """A number strictly between 0 and 1 per key and token id; the same bits on every device.

    Returns:
        float64 [len(keys), vocab_size]; column 0 is `uniform(keys)`.
    """
    return _uniform_of(noise_starts(keys, device), vocab_size)


def _uniform_of(starts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    counter = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=starts.device).mul_(_signed(_STEP))
    bits = starts[:, None] + counter  # [len(starts), vocab_size]
    scratch = torch.empty_like(bits)
    _mix_in_place(bits, scratch)
    # The uppermost bits become the fraction of a float64 between 1 and 2.
    _shift_right(bits, 64 - _UNIFORM_BITS, scratch)
    fraction = scratch.bitwise_or_(_BITS_OF_ONE).view(torch.float64)
    return fraction.sub_(1.0 - _HALF_STEP)


def gumbel_noise(keys: Sequence[NoiseKey], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise: argmax(log p + noise) has the law p (Gumbel 1954, Maddison et al. 2014).

    The uniform numbers below it are equal on every device; the two logarithms may differ in their last bit
    between a CPU and a GPU.

    Returns:
        float64 [len(keys), vocab_size].
    """
    return gumbel_rows(noise_starts(keys, device), vocab_size)


def gumbel_rows(starts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The same by where the sequence of each row begins, see `noise_starts`."""
    return _uniform_of(starts, vocab_size).log_().neg_().log_().neg_()


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * _FIRST_FACTOR & _MASK
    state = (state ^ (state >> 27)) * _SECOND_FACTOR & _MASK
    return state ^ (state >> 31)


def _mix_in_place(state: torch.Tensor, scratch: torch.Tensor) -> None:
    # int64 multiplication wraps around, so it yields the same 64 bits as the unsigned one.
    state ^= _shift_right(state, 30, scratch)
    state *= _signed(_FIRST_FACTOR)
    state ^= _shift_right(state, 27, scratch)
    state *= _signed(_SECOND_FACTOR)
    state ^= _shift_right(state, 31, scratch)


def _shift_right(state: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    # An int64 tensor shifts its sign in; the mask puts zeros there instead.
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
