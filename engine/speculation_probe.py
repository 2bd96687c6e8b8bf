"""A trial of the speculation method at start: does the target accept what the draft says?

A draft that does not belong to its target (the model of another family with the same tokenizer, a head that
was trained on other layers, an index shifted by one) runs without an error, and is never right: the answers
stay the target's own, and everything is slower than without. So a few short texts are continued before the
first request, and a draft whose guesses stand about as often as guesses at random is reported.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.engine_core import EngineCore
from engine.outputs import StepStats
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Of several kinds, so that no draft is unlucky with all of them.
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n: int) -> int:\n",
    "One, two, three, four, five,",
    "Once upon a time there was a little girl who",
)
MAX_TOKENS = 24
MAX_SECONDS = 4.0
# The prompts' step, and three that check a draft for each of them: taken however slow the machine is.
MIN_STEPS = 4

# A draft of the right family has its first token accepted in half of the steps or more, a wrong one now and
# then where the text is a matter of course.
NEAR_CHANCE = 0.1
# Fewer drafts than these say nothing.
MIN_DRAFTS = 12

ADVICE = (
    "speculation will cost time and gain nothing. Check that the draft was made for this model (same family, "
    "same fine-tuning); that both number their tokens alike; for an EAGLE head also which layers it reads: "
    "ids in its config may mean either, so try layer_convention: hidden_states and layer_outputs. "
    "probe: false switches this check off"
)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the trial brought.

    Attributes:
        num_drafts: Drafts checked.
        num_hits: Those of which at least the first token stood.
        num_draft_tokens: Draft tokens checked.
        num_accepted_tokens: Those that stood.
        seconds: How long it took.
    """

    num_drafts: int
    num_hits: int
    num_draft_tokens: int
    num_accepted_tokens: int
    seconds: float

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def is_near_chance(self) -> bool:
        """Whether the first token of a draft stands about as rarely as one guessed at random."""
        return self.num_drafts >= MIN_DRAFTS and self.num_hits < NEAR_CHANCE * self.num_drafts


def probe_speculation(
    core: EngineCore, tokenizer: Tokenizer, clock: Callable[[], float] = time.perf_counter
) -> ProbeResult:
    """Continues a few texts greedily, for MAX_SECONDS at most unless MIN_STEPS take longer.

    Args:
        core: An engine core without work, which is left without work. Its counters and its prefix cache are
            those of the trial afterwards, so nobody should be served by it.
        tokenizer: The target's.
        clock: Seconds, monotonic.
    """
    began = clock()
    request_ids = []
    for number, text in enumerate(PROMPTS):
        token_ids = tokenizer.encode(text)
        room = core.limits.max_model_len - len(token_ids)
        if room > 0:
            params = SamplingParams(temperature=0.0, max_tokens=min(MAX_TOKENS, room), ignore_eos=True)
            request_ids.append(f"probe-{number}")
            core.add_request(request_ids[-1], token_ids, params)
    num_steps = 0
    while core.has_work and (num_steps < MIN_STEPS or clock() - began < MAX_SECONDS):
        core.step()
        num_steps += 1
    for request_id in request_ids:
        core.abort(request_id)
    return _result(core.take_stats(), clock() - began)


def log_probe(result: ProbeResult, method: str) -> None:
    """Says what came of it: a warning if the draft is hardly ever right."""
    if not result.num_drafts:
        logger.warning("speculation probe: %s proposed nothing in %.1f s", method, result.seconds)
        return
    level = logging.WARNING if result.is_near_chance else logging.INFO
    logger.log(
        level,
        "speculation probe: first token accepted in %d of %d drafts, %d of %d tokens in all, %.1f s%s",
        result.num_hits,
        result.num_drafts,
        result.num_accepted_tokens,
        result.num_draft_tokens,
        result.seconds,
        f": that is near chance, and {ADVICE}" if result.is_near_chance else "",
    )


def _result(stats: StepStats, seconds: float) -> ProbeResult:
    return ProbeResult(
        num_drafts=stats.num_drafts,
        num_hits=sum(length > 0 for length in stats.accepted_lengths),
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        seconds=seconds,
    )
