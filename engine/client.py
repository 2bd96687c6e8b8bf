"""EngineClient: the only face of the engine that the server sees.

Behind it stands a thread today; a process or a remote replica could stand there tomorrow.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.acceptance import ANY_LOSSLESS, AcceptancePolicy
from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.infill import Infill
from engine.outputs import RequestOutput, StepStats
from engine.planning import PlannerReport
from engine.sampling_params import SamplingParams

StatsListener = Callable[[StepStats], None]
ChatMessage = Mapping[str, object]

MAX_BATCH = 128
"""Outputs handled in one go: while a client does not read they pile up, and the event loop serves others."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server may know of the model.

    Attributes:
        name: The name it was loaded by.
        vocab_size: Token ids are 0 to vocab_size - 1; padding of the embedding is not counted.
        max_model_len: Tokens that prompt and answer share.
        method: The speculation method's name, "none" without one.
        max_draft_tokens: Draft nodes per step that the server was set to; 0 without speculation.
        has_chat_template: Whether chat requests can be served.
        chat_template: Its source; empty without one.
        tool_template: The source of the one for conversations with tools, if that is another one.
        acceptance: Which acceptance rules requests may ask for.
        weights: Type of the model's weights: float32, float16, bfloat16, int8, int6, int5 or int4.
        takes_predictions: Whether drafts are made from the predictions that requests bring.
        probed_acceptance: Share of draft tokens accepted in the trial at start; None if there was none.
    """

    name: str
    vocab_size: int
    max_model_len: int
    method: str
    max_draft_tokens: int
    has_chat_template: bool
    weights: str
    chat_template: str = ""
    tool_template: str = ""
    acceptance: AcceptancePolicy = ANY_LOSSLESS
    takes_predictions: bool = True
    probed_acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the engine loop goes round, and if not, why."""

    alive: bool
    reason: str = ""


class EngineClient(Protocol):
    """An engine as its users see it."""

    @property
    def model(self) -> ModelInfo:
        """The model being served."""

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Yields the outputs of one request; closing the generator early aborts it.

        Those that have come since the last ones come together, but no more than MAX_BATCH.

        Raises:
            InvalidRequest: The request cannot be served as it stands.
            Overloaded: The queue is full.
            RequestFailed: The request failed in the engine.
            EngineDead: The engine loop has ended or hangs.
        """

    async def abort(self, request_id: str) -> None:
        """Ends a request; unknown ids are no error, since requests end on their own."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, made off the event loop."""

    async def encode_continuation(self, text: str, before: Sequence[int]) -> list[int]:
        """Token ids of a text as the model would write it behind other tokens, made off the event loop.

        Raises:
            InvalidRequest: The text holds half of a surrogate pair; it names prediction.
        """

    async def encode_infill(self, before: str, behind: str) -> Infill:
        """The texts around a gap as a prompt, made off the event loop.

        Raises:
            InvalidRequest: The model does not fill gaps.
        """

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token adds to the text they make together; it may be a part of a character."""

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak, or to go on.

        Args:
            messages: What was said.
            tools: Functions that the assistant may call, for templates that know of such things.
            options: What else the template is told.

        Raises:
            InvalidRequest: The model has no chat template, or its template refuses the messages.
        """

    def subscribe(self, listener: StatsListener) -> None:
        """Calls `listener` with the statistics of every step, on the engine's own thread."""

    async def trace(self, num_steps: int) -> bytes:
        """Traces the next steps, operator by operator, and waits for them.

        Returns:
            A trace in Chrome's JSON format, with a region for each part of a step.

        Raises:
            InvalidRequest: Another trace is being made.
            EngineDead: The engine loop has ended or hangs.
        """

    async def planner_report(self) -> PlannerReport:
        """What the planner of speculation goes by and has done.

        Raises:
            InvalidRequest: The engine runs without speculation.
            EngineDead: The engine loop has ended or hangs.
        """

    def health(self) -> EngineHealth:
        """Whether the engine loop lives."""
