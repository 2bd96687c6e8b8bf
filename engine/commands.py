"""What the event loop's side asks of the engine's thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.grammar import Matcher
from engine.inbox import Inbox
from engine.inquiry import PlannerInquiry
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """Takes a request in; its outputs go to the inbox."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    matcher: Matcher | None
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request; with an inbox only the one that is read there, not a namesake."""

    request_id: str
    inbox: Inbox | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """Ends the thread; the reason is for requests that are open then."""

    reason: str


Command = Add | Abort | PlannerInquiry | Close
