"""How many tokens of a committed run stand, and whether the answer ends with them.

A step commits a run of one or more tokens. The rules are applied token by token, as if each had come in
a step of its own, so a run of any length ends where plain decoding would have ended. Stop strings need
text and are the output processor's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends one request, text aside.

    Attributes:
        eos_token_ids: Every id that ends the model's turn.
        stop_token_ids: Ids that the request itself names.
        ignore_eos: Treat `eos_token_ids` as ordinary tokens.
        min_tokens: Tokens in front of the first one that may stop; the sampler bans stop ids until then.
        max_tokens: Tokens of the answer at most, with the room in the context already taken into account.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    min_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The verdict on a run.

    Attributes:
        num_kept: Leading tokens of the run that stand. A token that stops is one of them: it counts, though
            its text is not shown.
        reason: Why the answer ends behind them; None if it goes on. With STOP the last kept token is the one
            that stops.
        stop_token: That token, if the request named it; None for the model's own EOS.
    """

    num_kept: int
    reason: FinishReason | None = None
    stop_token: int | None = None


def apply_stop_rules(run: Sequence[int], num_output_tokens: int, rules: StopRules) -> Stop:
    """Cuts a run at the first token that ends the answer.

    Args:
        run: Tokens that a step committed, in order.
        num_output_tokens: Length of the answer before them.
        rules: What ends the request.

    Returns:
        A stop id or EOS wins over the limit when both fall on the same token.
    """
    room = max(rules.max_tokens - num_output_tokens, 0)
    # A token is a stop once min_tokens others are in front of it.
    first = max(rules.min_tokens - num_output_tokens, 0)
    for index in range(first, min(len(run), room)):
        token = run[index]
        if token in rules.stop_token_ids:
            return Stop(index + 1, FinishReason.STOP, token)
        if token in rules.eos_token_ids and not rules.ignore_eos:
            return Stop(index + 1, FinishReason.STOP)
    if len(run) >= room:
        return Stop(room, FinishReason.LENGTH)
    return Stop(len(run))
