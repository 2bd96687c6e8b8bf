"""Stand-ins for the engine: no model, no torch, every answer written down beforehand."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine.acceptance import ANY_LOSSLESS, AcceptancePolicy
from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.client import ChatMessage, EngineHealth, ModelInfo, StatsListener
from engine.errors import EngineDead, EngineError
from engine.infill import Infill
from engine.outputs import (
    FinishReason,
    RequestOutput,
    SpeculationStats,
    TokenLogprob,
    TopLogprob,
)
from engine.planning import MethodReport, OutcomeCount, PlannerReport, PlanOutcome, RequestReport, RowCost
from engine.sampling_params import SamplingParams, SpeculationParams

BOS, EOS, END_OF_TURN = 256, 257, 258
VOCAB_SIZE = 259
SPECIAL = {BOS: "<s>", EOS: "</s>", END_OF_TURN: "<|end|>"}

Answer = Callable[[Sequence[int], SamplingParams], bytes]


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A request as the engine got it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass
class FakeEngine:
    """An EngineClient over bytes: token ids 0 to 255 are bytes, then come BOS, EOS and end of turn.

    Attributes:
        answer: What to say, as bytes or as a function of prompt and parameters.
        tokens_per_step: Tokens that one output carries; all but one count as accepted draft tokens of
            `drafted_per_step` drafted ones. A request without speculation gets one at a time.
        step_seconds: Time between outputs.
        capacity: Requests that run at once; others wait. None is no limit.
        add_bos: Whether encode() puts BOS in front.
        admission_error: Raised by every generate() before its first output.
        error_after: After this many outputs a request raises `error`.
        ending: Finish reason of complete answers.
        chat_template: The template's source, from which the server learns how calls are written.
        tool_template: The source of another one for conversations with tools.
        template_error: Raised by apply_chat_template().
        trace_error: Raised by trace().
        planner_error: Raised by planner_report().
        requests: What came in, in order.
        num_cached_tokens: What a prompt's first choice finds in the cache; each later one finds one more.
        conversations, tools, chat_options: What apply_chat_template() got, in order.
        aborted: Ids of requests that were left before their end, in order.
        active: Ids of requests between generate() and their end, waiting ones included.
    """

    answer: bytes | Answer = b"Hello, world!"
    tokens_per_step: int = 3
    drafted_per_step: int = 4
    step_seconds: float = 0.0
    capacity: int | None = None
    add_bos: bool = False
    max_model_len: int = 512
    num_cached_tokens: int = 0
    admission_error: EngineError | None = None
    error_after: int | None = None
    error: Exception = field(default_factory=lambda: EngineDead("the engine loop has ended"))
    ending: FinishReason = FinishReason.STOP
    chat_template: str = ""
    tool_template: str = ""
    template_error: Exception | None = None
    trace_error: EngineError | None = None
    planner_error: EngineError | None = None
    acceptance: AcceptancePolicy = ANY_LOSSLESS
    takes_predictions: bool = True
    alive: bool = True
    requests: list[FakeRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    active: set[str] = field(default_factory=set)
    conversations: list[list[ChatMessage]] = field(default_factory=list)
    chat_options: list[ChatOptions] = field(default_factory=list)
    tools: list[list[ChatMessage]] = field(default_factory=list)
    listeners: list[StatsListener] = field(default_factory=list)
    running: int = 0

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            name="org/fake-model",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            method="ngram",
            max_draft_tokens=self.drafted_per_step,
            has_chat_template=True,
            chat_template=self.chat_template,
            tool_template=self.tool_template,
            weights="int8",
            acceptance=self.acceptance,
            takes_predictions=self.takes_predictions,
        )

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[list[RequestOutput], None]:
        request = FakeRequest(request_id, tuple(prompt_token_ids), params)
        self.requests.append(request)
        if self.admission_error is not None:
            raise self.admission_error
        self.active.add(request_id)
        finished = admitted = False
        try:
            while self.capacity is not None and self.running >= self.capacity:
                await asyncio.sleep(0.005)
            self.running += 1
            admitted = True
            for number, output in enumerate(self._outputs(request)):
                await asyncio.sleep(self.step_seconds)
                if number == self.error_after:
                    finished = True
                    raise self.error
                finished = output.finish_reason is not None
                yield [output]
        finally:
            self.running -= admitted
            self.active.discard(request_id)
            if not finished:
                await asyncio.sleep(0)  # as an engine would tell its thread
                self.aborted.append(request_id)

    def _outputs(self, request: FakeRequest) -> Iterator[RequestOutput]:
        params = request.params
        said = (
            self.answer if isinstance(self.answer, bytes) else self.answer(request.prompt_token_ids, params)
        )
        limit = self.max_model_len - len(request.prompt_token_ids)
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        tokens = said[:limit]
        ending = self.ending if len(said) <= limit and params.max_tokens != 0 else FinishReason.LENGTH
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        per_step = self.tokens_per_step if params.speculation.enabled else 1
        starts = range(0, len(tokens), per_step) or [0]
        for step, start in enumerate(starts, start=1):
            run = tokens[start : start + per_step]
            last = start + per_step >= len(tokens)
            yield RequestOutput(
                request_id=request.request_id,
                token_ids=tuple(run),
                text=decoder.decode(run, final=last),
                logprobs=None
                if params.logprobs is None
                else tuple(fake_logprob(token, start + i, params.logprobs) for i, token in enumerate(run)),
                prompt_logprobs=self._prompt_logprobs(request) if step == 1 else None,
                finish_reason=ending if last else None,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=self.num_cached_tokens + params.choice,
                num_output_tokens=start + len(run),
                speculation=self._speculation(step, tokens[: start + len(run)], params.speculation),
            )

    def _speculation(self, step: int, said: bytes, wishes: SpeculationParams) -> SpeculationStats:
        """Of a prediction the answer has what they begin with in common."""
        num_tokens, enabled = len(said), wishes.enabled
        num_predicted = len(wishes.prediction) * enabled
        pairs = zip(said, wishes.prediction[:num_predicted], strict=False)
        num_found = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not num_tokens:
            return SpeculationStats(num_predicted_tokens=num_predicted)
        return SpeculationStats(
            num_predicted_tokens=num_predicted,
            num_found_tokens=num_found,
            num_steps=step,
            num_drafts=step * enabled,
            num_draft_tokens=step * self.drafted_per_step * enabled,
            num_accepted_tokens=num_tokens - step,
            num_committed_tokens=num_tokens,
        )

    def _prompt_logprobs(self, request: FakeRequest) -> tuple[TokenLogprob | None, ...] | None:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        rest = request.prompt_token_ids[1:]
        return (None, *(fake_logprob(token, i, count) for i, token in enumerate(rest)))

    async def abort(self, request_id: str) -> None:
        if request_id in self.active:
            self.aborted.append(request_id)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self.add_bos and add_special_tokens) + list(text.encode())

    async def encode_continuation(self, text: str, before: Sequence[int]) -> list[int]:
        return list(text.encode())

    async def encode_infill(self, before: str, behind: str) -> Infill:
        return Infill((BOS, *before.encode(), EOS, *behind.encode(), END_OF_TURN), (33,))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(token_bytes(token) for token in token_ids).decode(errors="replace")

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return [token_bytes(token) for token in token_ids]

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[int]:
        self.chat_options.append(options)
        self.conversations.append(list(messages))
        self.tools.append(list(tools))
        if self.template_error is not None:
            raise self.template_error
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return list((text[:-1] if options.continues else f"{text}assistant:").encode())

    def subscribe(self, listener: StatsListener) -> None:
        self.listeners.append(listener)

    async def trace(self, num_steps: int) -> bytes:
        if self.trace_error is not None:
            raise self.trace_error
        return b'{"traceEvents": [], "steps": %d}' % num_steps

    async def planner_report(self) -> PlannerReport:
        if self.planner_error is not None:
            raise self.planner_error
        rates = ((0.75, 0.125), (2 / 3, 0.25))
        return PlannerReport(
            planner="auto",
            forward=(RowCost(1, 10.0, 7), RowCost(8, 17.5, 0), RowCost(16, 1234.5678, 0)),
            speed=1.25,
            microseconds_per_context_token=0.5,
            microseconds_per_row_and_context_token=0.25,
            host_milliseconds_per_step=1.0,
            host_milliseconds_per_request=0.125,
            methods=(MethodReport("draft_model", rates, 12, 0.0, 1.5, 0.25),),
            requests=(RequestReport("chatcmpl-1", "draft_model", 0.5, 4),),
            outcomes=(OutcomeCount(PlanOutcome.LOAD, 3),),
            num_granted=44,
            prediction_error=1 / 3000,
        )

    def health(self) -> EngineHealth:
        return EngineHealth(self.alive, "" if self.alive else "the loop died of a test")


def token_bytes(token_id: int) -> bytes:
    """A fake token's bytes."""
    return SPECIAL[token_id].encode() if token_id in SPECIAL else bytes([token_id])


def fake_logprob(token_id: int, position: int, count: int) -> TokenLogprob:
    """A made-up, reproducible logprob; the chosen token is the likeliest, its neighbours follow."""
    best = -0.125 * (position % 7 + 1)
    top = tuple(_candidate((token_id + rank) % VOCAB_SIZE, best - rank) for rank in range(count))
    chosen = _candidate(token_id, best)
    return TokenLogprob(chosen.token_id, chosen.token, chosen.bytes, chosen.logprob, top, 1)


def _candidate(token_id: int, logprob: float) -> TopLogprob:
    raw = token_bytes(token_id)
    return TopLogprob(token_id, raw.decode(errors="replace"), raw, logprob)
