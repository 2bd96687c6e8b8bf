"""What a step holds before anything is drafted for it, and the size of one that is planned."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.request import Request
from engine.core.scheduler import ScheduledRequest, Scheduler
from engine.speculation.planner import Load
from engine.speculation.step_cost import StepShape


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The coming step.

    Attributes:
        requests: All that compute and may speculate, in the scheduler's order.
        decoding: Those of them that get a token.
        load: What the step holds without drafts.
    """

    requests: Sequence[Request]
    decoding: Sequence[Request]
    load: Load


def batch_of(scheduler: Scheduler) -> DraftBatch:
    """The coming step, as the scheduler would fill it without drafts."""
    requests: list[Request] = []
    decoding: list[Request] = []
    num_running = num_decoding = context = 0
    for request in scheduler.running:
        if request.is_held:
            continue
        num_running += 1
        speculates = request.params.speculation.enabled
        if speculates:
            requests.append(request)
        num_tokens = len(request.token_ids)
        if num_tokens - request.num_computed_tokens == 1:
            num_decoding += 1
            context += num_tokens
            if speculates:
                decoding.append(request)
    whole = shape = StepShape(num_decoding, num_decoding, context, context)
    num_read = 0
    if scheduler.waiting or num_decoding < num_running:
        num_read, num_prompt_rows = scheduler.num_prompt_rows()
        if num_prompt_rows:
            rows = num_decoding + num_prompt_rows
            whole = StepShape(rows, num_decoding, context, context, reads_prompts=True)
    return DraftBatch(
        requests, decoding, Load(shape, whole, scheduler.num_draft_rows(), num_running, num_read)
    )


def shape_of(scheduled: Iterable[ScheduledRequest]) -> StepShape:
    """The size of a step, its drafts included."""
    rows = requests = context = row_context = 0
    reads_prompts = False
    for item in scheduled:
        own = item.num_tokens + len(item.tree)
        seen = item.request.num_computed_tokens + own
        rows += own
        requests += 1
        context += seen
        row_context += own * seen
        reads_prompts = reads_prompts or item.num_tokens > 1
    return StepShape(rows, requests, context, row_context, reads_prompts)
