"""What the engine says: the outputs of requests and the statistics of steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.errors import InvalidRequest
from engine.planning import PlanStats


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StepPart(StrEnum):
    """The parts of a step, in their order: where an engine's time goes.

    Commands: requests that come and go. Propose: drafts, and the last step's full blocks into the prefix
    cache. Schedule: what the step computes. Build: its tensors. Forward: the target's pass. Sample: options,
    choice, verification. Stop: stop rules and text. Commit: bookkeeping, accepted nodes moved into line.
    Output: what requests get, and statistics.
    """

    COMMANDS = "commands"
    PROPOSE = "propose"
    SCHEDULE = "schedule"
    BUILD = "build"
    FORWARD = "forward"
    SAMPLE = "sample"
    STOP = "stop"
    COMMIT = "commit"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One candidate for a position.

    Attributes:
        token_id: Its id.
        token: Its text, with U+FFFD where its bytes are no whole character.
        bytes: Its bytes.
        logprob: Natural logarithm of the target's probability before any sampling option acts.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(TopLogprob):
    """The chosen token of a position, its best alternatives, most likely first, and, in prompts, its rank."""

    top: tuple[TopLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one request so far.

    Attributes:
        num_steps: Target forwards that committed tokens for this request.
        num_drafts: Those among them that had a draft to check.
        num_draft_tokens: Draft nodes checked.
        num_accepted_tokens: Draft tokens that became part of the answer; never more than drafted.
        num_committed_tokens: Tokens of the answer; divided by num_steps: tokens per forward.
        num_predicted_tokens: Tokens of the request's own prediction; 0 where it brought none.
        num_found_tokens: Those among them that the answer has so far.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_predicted_tokens: int = 0
    num_found_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one request: everything here but the totals is new since the last one.

    Attributes:
        request_id: Which request.
        token_ids: New tokens of the answer.
        text: New text; may lag behind the tokens while a character or a stop string is incomplete.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: One entry per prompt token, the first None; comes once, with the first output.
        finish_reason: Set on the last output.
        stop_reason: The stop string or stop id that ended the answer, if one of those did.
        error: What to tell the client where it ended with an error that the request itself brought about.
        num_prompt_tokens: Length of the prompt.
        num_cached_tokens: Leading prompt tokens that the prefix cache supplied at admission.
        num_output_tokens: Length of the answer so far.
        speculation: What speculation did so far.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: InvalidRequest | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended in a step, for the metrics.

    Attributes:
        reason: Why.
        num_prompt_tokens, num_output_tokens: Its lengths.
        e2e_seconds: From arrival to end.
        is_lossless: Whether its answer had the model's own law; false under typical acceptance.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    e2e_seconds: float
    is_lossless: bool = True


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did, in increments, and how full the engine is after it.

    Attributes:
        num_running, num_waiting: Requests after the step.
        kv_cache_usage: Share of KV blocks in use, 0 to 1.
        prefix_cache_queries, prefix_cache_hits: Prompt tokens looked up and found.
        num_preemptions: Requests put back to wait because the pool was dry.
        num_prompt_tokens: Prompt tokens processed.
        num_generation_tokens: Tokens committed to answers.
        num_target_forwards: 1, or 0 when nothing was scheduled.
        num_request_forwards: Requests that it brought tokens for; what speculation alone wins is tokens over
            these, while tokens over forwards grow with the batch as well.
        num_drafts: Requests that had a draft checked.
        num_draft_tokens: Draft nodes checked.
        num_accepted_tokens: Draft tokens that stood.
        accepted_lengths: Per draft checked, how many of its tokens stood.
        num_outgrown: Requests that stopped speculating because they outgrew the draft's context.
        plan: What the planner decided for the step; None without speculation.
        part_seconds: Where the time went; parts that took none may be missing.
        ttft_seconds: Arrival to first token, per request that got its first one.
        inter_token_seconds: Per further token: time since the request's last output over its tokens.
        queue_seconds: Arrival to first being scheduled, per request.
        finished: Requests that ended.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_target_forwards: int = 0
    num_request_forwards: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_lengths: tuple[int, ...] = ()
    num_outgrown: int = 0
    plan: PlanStats | None = None
    part_seconds: Mapping[StepPart, float] = field(default_factory=dict)
    ttft_seconds: tuple[float, ...] = ()
    inter_token_seconds: tuple[float, ...] = ()
    queue_seconds: tuple[float, ...] = ()
    finished: tuple[FinishedRequest, ...] = ()
