"""StepRecorder: gathers what one step did, and each request's clock, into StepStats."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.acceptance import is_lossless
from engine.outputs import FinishedRequest, FinishReason, SpeculationStats, StepPart, StepStats
from engine.planning import PlanStats
from engine.sampling_params import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """One request's clock and counters.

    Attributes:
        arrival: When it was added, seconds of the engine's clock.
        scheduled: When it first took part in a step.
        last_output: When its last tokens were committed.
        num_cached_tokens: Prompt tokens that the prefix cache supplied when it first took part.
        is_lossless: Whether its acceptance rule keeps the model's law.
        num_steps, num_drafts, num_draft_tokens, num_accepted_tokens, num_committed_tokens,
            num_predicted_tokens, num_found_tokens: See SpeculationStats.
    """

    arrival: float
    scheduled: float | None = None
    last_output: float | None = None
    num_cached_tokens: int = 0
    is_lossless: bool = True
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_predicted_tokens: int = 0
    num_found_tokens: int = 0

    @classmethod
    def of(cls, params: SamplingParams, arrival: float) -> "RequestRecord":
        """A new request's."""
        wanted = params.speculation
        num_predicted = len(wanted.prediction) if wanted.enabled else 0
        return cls(arrival, is_lossless=is_lossless(params), num_predicted_tokens=num_predicted)

    def stats(self) -> SpeculationStats:
        """The counters, frozen."""
        return SpeculationStats(
            self.num_steps,
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.num_committed_tokens,
            self.num_predicted_tokens,
            self.num_found_tokens,
        )


@dataclass(slots=True)
class StepRecorder:
    """One step in the making. Counters mean what they mean in StepStats."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_target_forwards: int = 0
    num_request_forwards: int = 0
    num_outgrown: int = 0
    num_draft_tokens: int = 0
    part_seconds: Mapping[StepPart, float] = field(default_factory=dict)
    plan: PlanStats | None = None
    _accepted_lengths: list[int] = field(default_factory=list)
    _ttft: list[float] = field(default_factory=list)
    _inter_token: list[float] = field(default_factory=list)
    _queue: list[float] = field(default_factory=list)
    _finished: list[FinishedRequest] = field(default_factory=list)

    def planned(self, num_preemptions: int, prefix_cache_queries: int, prefix_cache_hits: int) -> None:
        """Notes what the scheduler did to begin the step."""
        self.num_preemptions += num_preemptions
        self.prefix_cache_queries += prefix_cache_queries
        self.prefix_cache_hits += prefix_cache_hits

    def scheduled(self, record: RequestRecord, now: float) -> None:
        """Notes that a request takes part in the step."""
        if record.scheduled is None:
            record.scheduled = now
            self._queue.append(now - record.arrival)

    def committed(
        self, record: RequestRecord, num_tokens: int, num_drafted: int, num_accepted: int, now: float
    ) -> None:
        """Notes a verdict: of num_drafted nodes num_accepted stand, and num_tokens tokens in all."""
        record.num_steps += 1
        self.num_request_forwards += 1
        record.num_committed_tokens += num_tokens
        self.num_generation_tokens += num_tokens
        if num_drafted:
            record.num_drafts += 1
            record.num_draft_tokens += num_drafted
            record.num_accepted_tokens += num_accepted
            self.num_draft_tokens += num_drafted
            self._accepted_lengths.append(num_accepted)
        if not num_tokens:
            return
        if record.last_output is None:
            self._ttft.append(now - record.arrival)
            # The first tokens came together; only those behind the first have one before them.
            self._inter_token.extend([0.0] * (num_tokens - 1))
        else:
            self._inter_token.extend([(now - record.last_output) / num_tokens] * num_tokens)
        record.last_output = now

    def finished(
        self, record: RequestRecord, reason: FinishReason, lengths: tuple[int, int], now: float
    ) -> None:
        """Notes a request's end; lengths are those of its prompt and answer."""
        self._finished.append(
            FinishedRequest(reason, *lengths, now - record.arrival, is_lossless=record.is_lossless)
        )

    def build(self, num_running: int, num_waiting: int, kv_cache_usage: float) -> StepStats:
        """The step as the metrics want it."""
        return StepStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=kv_cache_usage,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_target_forwards=self.num_target_forwards,
            num_request_forwards=self.num_request_forwards,
            num_drafts=len(self._accepted_lengths),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_lengths),
            accepted_lengths=tuple(self._accepted_lengths),
            num_outgrown=self.num_outgrown,
            part_seconds=self.part_seconds,
            plan=self.plan,
            ttft_seconds=tuple(self._ttft),
            inter_token_seconds=tuple(self._inter_token),
            queue_seconds=tuple(self._queue),
            finished=tuple(self._finished),
        )
