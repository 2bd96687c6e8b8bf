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
    decoding = [request for request in scheduler.running if request.num_uncomputed_tokens == 1]
    context = sum(request.num_tokens for request in decoding)
    shape = StepShape(len(decoding), len(decoding), context, context)
    whole = shape
    num_prompt_rows = scheduler.num_prompt_rows()
    if num_prompt_rows:
        rows = len(decoding) + num_prompt_rows
        whole = StepShape(rows, len(decoding), context, context, reads_prompts=True)
    computing = [request for request in scheduler.running if not request.is_held]
    return DraftBatch(
        [request for request in computing if request.params.speculation.enabled],
        [request for request in decoding if request.params.speculation.enabled],
        Load(shape, whole, scheduler.num_draft_rows(), len(computing)),
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
