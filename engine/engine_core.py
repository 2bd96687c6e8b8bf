"""EngineCore: add, abort, step. No thread, no asyncio, no HTTP."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.admission import EngineLimits, admit
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from engine.core.stopping import apply_stop_rules
from engine.drafting import Drafting
from engine.errors import InvalidRequest, Overloaded
from engine.grammar import Matcher
from engine.model.model_runner import ModelRunner
from engine.output_processor import OutputProcessor
from engine.outputs import FinishReason, RequestOutput, StepPart, StepStats
from engine.planning import PlannerReport
from engine.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import SampledRun
from engine.sampling_params import SamplingParams
from engine.step_recorder import RequestRecord, StepRecorder
from engine.step_rows import StepRows, sampler_of
from engine.step_timer import StepTimer

logger = logging.getLogger(__name__)


class EngineCore:
    """The loop's body: one target, one scheduler, perhaps a speculator.

    Args:
        runner: The target model.
        scheduler: Decides what a step computes.
        outputs: Turns committed tokens into text.
        limits: What requests are checked against.
        drafting: Speculation; None decodes plainly.
        clock: Seconds, monotonic.

    Attributes:
        timer: Where the time goes. Between steps nothing runs, unless who steps enters a part.
        launches_early: Whether a step soon has a device at work, so that all else can be done meanwhile.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        limits: EngineLimits,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.timer = StepTimer(clock)
        self._runner = runner
        self._outputs = outputs
        self._drafting = drafting
        wanted = None if drafting is None else drafting.hidden_states
        self._tap = None if wanted is None else runner.tap(wanted)
        self._clock = clock
        self._sampler = sampler_of(runner)
        self._prompt_logprobs = PromptLogprobs()
        self._rows = StepRows(scheduler.kv, self._prompt_logprobs, limits.eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._records: dict[str, RequestRecord] = {}
        self.launches_early = runner.device.type != "cpu" and (drafting is None or not drafting.computes)
        self._taken: tuple[float, float] | None = None  # By the last step's pass and choice, and the rest.
        self._in_step: tuple[Request, ...] = ()
        self._recorder = StepRecorder()

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        matcher: Matcher | None = None,
    ) -> None:
        """Queues a request; `matcher` is its constraint, if somebody compiled it already.

        Raises:
            InvalidRequest: It cannot be served as it stands.
            Overloaded: The queue is full.
        """
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id} is in use")
        if len(self.scheduler.waiting) >= self.limits.max_num_queued:
            raise Overloaded(f"{len(self.scheduler.waiting)} requests are waiting already; try again later")
        request = admit(request_id, prompt_token_ids, params, self.limits)
        if self._drafting is not None:
            request.needs_draft_cache = self._drafting.follows(request, self.scheduler)
        if params.constraint is not None:
            request.matcher = matcher or self.limits.grammars.compile(params.constraint)
        self._outputs.add(request_id, request.params, prompt_token_ids)
        self._requests[request_id] = request
        self._records[request_id] = RequestRecord.of(request.params, self._clock())
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> RequestOutput | None:
        """Ends a request wherever it is; None if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        record = self._records[request_id]
        if self._drafting is not None and request.status is RequestStatus.RUNNING and not self._in_step:
            with self._runner.threads:
                self._drafting.read_up(request, self.scheduler)
        output = RequestOutput(
            request_id,
            text=self._outputs.finish(request_id),
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=record.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            speculation=record.stats(),
        )
        self._retire(request, reason)
        return output

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput]:
        """One forward pass of the target for everything, `meanwhile` beside it, and what follows from it."""
        with self._runner.threads:
            self._prepare()
            began = self.timer.enter(StepPart.SCHEDULE)
            plan = self.scheduler.schedule()
            self._note_plan(plan)
            rows = self._forward(plan)
            meanwhile()
            runs = self._sample(plan, rows)
            outputs = [self._commit(item, run) for item, run in zip(plan.scheduled, runs, strict=True)]
            seconds = self.timer.leave() - began
            forward = self.timer.lap(StepPart.FORWARD) + self.timer.lap(StepPart.SAMPLE)
            self._taken = forward, max(0.0, seconds - forward)
            self._in_step = ()
            return [output for output in outputs if output is not None]

    def abandon_step(self) -> list[str]:
        """After an exception in `step`: ends the requests that took part and names them; others go on."""
        self.timer.leave()
        failed = [request.request_id for request in self._in_step]
        for request_id in failed:
            self.abort(request_id, FinishReason.ERROR)
        self._in_step = ()
        return failed

    def planner_report(self) -> PlannerReport:
        """The planner's current table.

        Raises:
            InvalidRequest: There is no speculation to plan.
        """
        if self._drafting is None:
            raise InvalidRequest("nothing is planned: the engine runs without speculation")
        return self._drafting.report()

    def take_stats(self) -> StepStats:
        """What happened since the last call."""
        scheduler = self.scheduler
        self._recorder.part_seconds = self.timer.take()
        stats = self._recorder.build(scheduler.num_running, scheduler.num_waiting, scheduler.kv.usage)
        self._recorder = StepRecorder()
        return stats

    def _prepare(self) -> None:
        """Drafts for the step, once the last one's full blocks may be shared.

        Not at the end of the last one: its tokens go out first, and whoever has come meanwhile is known.
        """
        self.timer.enter(StepPart.PROPOSE)
        running = self._in_step = tuple(self.scheduler.running)
        if self._drafting is not None:
            if self._taken is not None:
                self._drafting.note_step(*self._taken)
                self._taken = None
            proposed = self._drafting.propose(self.scheduler)
            self._recorder.num_outgrown += proposed.num_outgrown
            self._recorder.plan = proposed.plan
        for request in running:
            self._publish(request)

    def _note_plan(self, plan: SchedulerOutput) -> None:
        self._in_step = tuple(item.request for item in plan.scheduled)
        recorder = self._recorder
        recorder.planned(len(plan.preempted), plan.prefix_cache_queries, plan.prefix_cache_hits)
        now = self._clock()
        for item in plan.scheduled:
            record = self._records[item.request.request_id]
            if record.scheduled is None:
                recorder.num_prompt_tokens += item.request.num_prompt_tokens
                record.num_cached_tokens = item.request.num_cached_tokens
            recorder.scheduled(record, now)
        if self._drafting is not None:
            self._drafting.note_plan(plan)

    def _forward(self, plan: SchedulerOutput) -> torch.Tensor:
        """Runs the target; [num_rows, vocab_size], the rows of each item in the plan's order."""
        self.timer.enter(StepPart.BUILD)
        batch = self._runner.build(self._rows.slices(plan))
        self.timer.enter(StepPart.FORWARD)
        self._recorder.num_target_forwards += 1
        if self._drafting is None or self._tap is None:
            return self._runner.forward(batch)
        tapped = self._runner.forward_tapped(batch, self._tap)
        self._drafting.note_features(plan, tapped.features)
        return tapped.logits

    def _sample(self, plan: SchedulerOutput, rows: torch.Tensor) -> list[SampledRun | None]:
        """The verdict on each item; None where the last committed token is not computed yet."""
        self.timer.enter(StepPart.SAMPLE)
        tasks, wanted = self._rows.tasks(plan, rows)
        remaining = iter(self._sampler(wanted, tasks) if tasks else ())
        return [next(remaining) if item.reaches_end else None for item in plan.scheduled]

    def _commit(self, item: ScheduledRequest, sampled: SampledRun | None) -> RequestOutput | None:
        """Enters a verdict: stops, text, bookkeeping. Tokens behind a stop leave no trace."""
        request = item.request
        if sampled is None:
            self._enter(item, (), ())
            return None
        self.timer.enter(StepPart.STOP)
        stop = apply_stop_rules(sampled.token_ids, request.num_output_tokens, request.stop_rules)
        processed = self._outputs.process(request.request_id, sampled.token_ids, stop)
        run = sampled.token_ids[: processed.num_kept]
        if request.matcher is not None and not request.matcher.advance(run):
            return self._dead_end(request, request.matcher, run)
        accepted = sampled.accepted_nodes[: len(run)]
        if self._drafting is not None:
            self._drafting.note_verdict(item, sampled.accepted_nodes)
        self._enter(item, run, accepted)
        record = self._records[request.request_id]
        is_first = record.num_steps == 0
        self._recorder.committed(record, len(run), len(item.tree), len(accepted), self._clock())
        if self._drafting is not None and record.num_predicted_tokens:
            record.num_found_tokens = self._drafting.num_found(request)
        self.timer.enter(StepPart.OUTPUT)
        drawn = sampled.logprobs
        logprobs = None if drawn is None else tuple(map(self._outputs.logprobs, drawn[: len(run)]))
        output = RequestOutput(
            request.request_id,
            token_ids=run,
            text=processed.text,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs.of(request, self._outputs.logprobs) if is_first else None,
            finish_reason=processed.finish_reason,
            stop_reason=processed.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=record.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            speculation=record.stats(),
        )
        if processed.finish_reason is not None:
            self._retire(request, processed.finish_reason)
        return output

    def _dead_end(self, request: Request, matcher: Matcher, run: Sequence[int]) -> RequestOutput | None:
        """Ends a request whose format leaves no token to go on with."""
        said = [*request.token_ids[request.num_prompt_tokens :], *run][: matcher.num_followed]
        error = matcher.dead_end(self._outputs.text_of(said))
        logger.warning("request %s ends: %s", request.request_id, error)
        output = self.abort(request.request_id, FinishReason.ERROR)
        return output and replace(output, error=error)

    def _enter(self, item: ScheduledRequest, run: Sequence[int], accepted: Sequence[int]) -> None:
        """Bookkeeping of the tokens that stand, `accepted` being the nodes among them."""
        self.timer.enter(StepPart.COMMIT)
        if accepted:
            self._runner.cache.move(*self.scheduler.kv.moves(item.request, accepted))
        if self._drafting is not None:
            self._drafting.note_commit(item, accepted)
        self.scheduler.update(item, run, len(accepted))

    def _publish(self, request: Request) -> None:
        """Lets later requests share what is computed."""
        num_draft = 0 if self._drafting is None else self._drafting.num_computed_tokens(request)
        self.scheduler.kv.publish(request, num_draft)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """Gives back everything a request holds."""
        if request.status is RequestStatus.RUNNING and reason is not FinishReason.ERROR:
            self._publish(request)
        self.scheduler.finish(request)
        if self._drafting is not None:
            self._drafting.retire(request)
        self._outputs.remove(request.request_id)
        self._prompt_logprobs.remove(request.request_id)
        record = self._records.pop(request.request_id)
        del self._requests[request.request_id]
        self._recorder.finished(
            record, reason, (request.num_prompt_tokens, request.num_output_tokens), self._clock()
        )
