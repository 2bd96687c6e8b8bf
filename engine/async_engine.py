"""AsyncEngine: an EngineCore on a thread of its own, an EngineClient towards the event loop.

Commands go in through a queue, outputs come out with one `call_soon_threadsafe` per step. The thread
never waits for a client, and the event loop never waits for a forward pass.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.client import ChatMessage, EngineHealth, ModelInfo, StatsListener
from engine.engine_core import EngineCore
from engine.errors import EngineDead, EngineError, InvalidRequest, RequestFailed
from engine.grammar import Matcher
from engine.inbox import Delivery, Inbox, hand_over
from engine.infill import Infill
from engine.inquiry import PlannerInquiry
from engine.outputs import RequestOutput, StepPart
from engine.planning import PlannerReport
from engine.profiler import Tracer
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    matcher: Matcher | None
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class _Abort:
    """Ends a request; with an inbox only the one that is read there, not a namesake."""

    request_id: str
    inbox: Inbox | None = None


class _Close:
    """Ends the thread."""


class AsyncEngine:
    """Runs an engine core; see EngineClient for what its methods mean.

    Args:
        core: The engine; nobody else may touch it once `start` was called.
        model: What the server may know of the model.
        tokenizer: None serves token ids only.
    """

    def __init__(self, core: EngineCore, model: ModelInfo, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._model = model
        self._tokenizer = tokenizer
        self._tracer = Tracer(core.timer)
        self._commands: queue.SimpleQueue[_Add | _Abort | PlannerInquiry | _Close] = queue.SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}
        self._listeners: list[StatsListener] = []
        self._dead = ""
        # Taken to set _dead and to queue an add, so that no add slips in behind the last look at the queue.
        self._death_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    @property
    def model(self) -> ModelInfo:
        """See EngineClient."""
        return self._model

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the engine thread after the step it is in; requests still open get EngineDead."""
        self._commands.put(_Close())
        if self._thread.ident is None:
            self._die("the engine was closed before it was started")
        elif self._thread.is_alive():
            self._thread.join()

    def subscribe(self, listener: StatsListener) -> None:
        """See EngineClient."""
        self._listeners.append(listener)

    def health(self) -> EngineHealth:
        """See EngineClient."""
        return EngineHealth(alive=not self._dead, reason=self._dead)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """See EngineClient."""
        inbox = Inbox()
        matcher = None
        if params.constraint is not None:
            matcher = await asyncio.to_thread(self._core.limits.grammars.compile, params.constraint)
        with self._death_lock:
            if self._dead:
                raise EngineDead(self._dead)
            self._commands.put(_Add(request_id, prompt_token_ids, params, matcher, inbox))
        is_open = True
        try:
            while is_open:
                delivery = await inbox.queue.get()
                if isinstance(delivery, EngineError):
                    is_open = False
                    raise delivery
                is_open = delivery.finish_reason is None
                yield delivery
        finally:
            if is_open:
                self._commands.put(_Abort(request_id, inbox))

    async def abort(self, request_id: str) -> None:
        """See EngineClient."""
        self._commands.put(_Abort(request_id))

    async def trace(self, num_steps: int) -> bytes:
        """See EngineClient."""
        with self._death_lock:
            if self._dead:
                raise EngineDead(self._dead)
            answer = self._tracer.ask(num_steps)
        trace = await asyncio.wrap_future(answer)
        return await asyncio.to_thread(trace.export)

    async def planner_report(self) -> PlannerReport:
        """See EngineClient."""
        inquiry = PlannerInquiry()
        with self._death_lock:
            if self._dead:
                raise EngineDead(self._dead)
            self._commands.put(inquiry)
        return await asyncio.wrap_future(inquiry.answer)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See EngineClient."""
        encode = self._require_tokenizer().encode
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    async def encode_continuation(self, text: str, before: Sequence[int]) -> list[int]:
        """See EngineClient."""
        return await asyncio.to_thread(self._require_tokenizer().encode_continuation, text, before)

    async def encode_infill(self, before: str, behind: str) -> Infill:
        """See EngineClient."""
        return await asyncio.to_thread(self._require_tokenizer().encode_infill, before, behind)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """See EngineClient."""
        return await asyncio.to_thread(self._require_tokenizer().decode, token_ids, skip_special_tokens=False)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """See EngineClient."""
        return await asyncio.to_thread(self._require_tokenizer().spelling, token_ids)

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[int]:
        """See EngineClient."""
        apply = self._require_tokenizer().apply_chat_template
        return await asyncio.to_thread(apply, messages, tools, options)

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineError("the model has no tokenizer: send the prompt as token ids")
        return self._tokenizer

    def _run(self) -> None:
        """The engine thread."""
        reason = "the engine was closed"
        try:
            while self._obey():
                if self._core.has_work:
                    self._tracer.before_step()
                    self._step()
                    self._tracer.after_step()
                self._report()
        except BaseException as error:
            # Not even an exit may pass: above a thread is nobody who could tell the clients.
            logger.exception("the engine loop died")
            reason = f"the engine loop died: {error}"
        finally:
            self._die(reason)

    def _obey(self) -> bool:
        """Carries out all queued commands, waiting for one if there is nothing else to do."""
        block = not self._core.has_work
        timer = self._core.timer
        timer.enter(StepPart.COMMANDS)
        if block:
            timer.leave()  # Waiting is no part of a step.
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            timer.enter(StepPart.COMMANDS)
            block = False
            match command:
                case _Add():
                    self._add(command)
                case _Abort():
                    self._abort(command)
                case PlannerInquiry():
                    command.settle(self._core.planner_report)
                case _Close():
                    return False

    def _add(self, command: _Add) -> None:
        if command.request_id in self._inboxes:
            command.inbox.refuse(InvalidRequest(f"request id {command.request_id} is in use"))
            return
        self._inboxes[command.request_id] = command.inbox
        try:
            self._core.add_request(
                command.request_id, command.prompt_token_ids, command.params, command.matcher
            )
        except EngineError as error:
            self._deliver({command.request_id: error})
        except Exception:
            logger.exception("request %s failed on its way in; the engine goes on", command.request_id)
            self._deliver({command.request_id: _failure()})

    def _abort(self, command: _Abort) -> None:
        request_id = command.request_id
        if command.inbox is not None and command.inbox is not self._inboxes.get(request_id):
            return
        output = self._core.abort(request_id)
        if output is not None:
            self._deliver({request_id: output})

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except Exception:
            failed = self._core.abandon_step()
            if not failed:
                raise  # Whatever is wrong, it would go wrong again: there is nobody to end.
            logger.exception("a step failed; the requests in it are ended, the engine goes on")
            self._deliver(dict.fromkeys(failed, _failure()))
            return
        self._core.timer.enter(StepPart.OUTPUT)
        self._deliver({output.request_id: output.error or output for output in outputs})

    def _report(self) -> None:
        stats = self._core.take_stats()
        for listener in self._listeners:
            listener(stats)

    def _deliver(self, deliveries: Mapping[str, Delivery]) -> None:
        """Hands each request what is new, in one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for request_id, delivery in deliveries.items():
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                continue
            if isinstance(delivery, EngineError) or delivery.finish_reason is not None:
                del self._inboxes[request_id]
            by_loop.setdefault(inbox.loop, []).append(partial(inbox.queue.put_nowait, delivery))
        for loop, calls in by_loop.items():
            hand_over(loop, calls)

    def _die(self, reason: str) -> None:
        """Tells every waiting client, and every later one."""
        with self._death_lock:
            self._dead = reason
            while not self._commands.empty():  # Nobody else takes anything out.
                command = self._commands.get_nowait()
                if isinstance(command, _Add):
                    command.inbox.refuse(EngineDead(reason))
                elif isinstance(command, PlannerInquiry):
                    command.fail(EngineDead(reason))
            self._tracer.fail(EngineDead(reason))
        self._deliver(dict.fromkeys(list(self._inboxes), EngineDead(reason)))


def _failure() -> RequestFailed:
    return RequestFailed("the request failed inside the engine; the server's log says why")
