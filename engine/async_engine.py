"""AsyncEngine: an EngineCore on a thread of its own, an EngineClient towards the event loop.

Commands go in through a queue, outputs come out with one `call_soon_threadsafe` per step. The thread
never waits for a client, and the event loop never waits for a forward pass.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Sequence

from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.client import ChatMessage, EngineHealth, ModelInfo, StatsListener
from engine.commands import Abort, Add, Close, Command
from engine.engine_core import EngineCore
from engine.errors import EngineDead, EngineError, InvalidRequest, RequestFailed
from engine.inbox import Inbox, Inboxes
from engine.infill import Infill
from engine.inquiry import PlannerInquiry
from engine.outputs import RequestOutput, StepPart
from engine.planning import PlannerReport
from engine.profiler import Tracer
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

CLOSING_LOOK_SECONDS = 0.1
"""How often it is looked whether a thread that was told to end hangs."""


class AsyncEngine:
    """Runs an engine core; see EngineClient for what its methods mean.

    Args:
        core: The engine; nobody else may touch it once `start` was called.
        model: What the server may know of the model.
        tokenizer: None serves token ids only.
        step_timeout_seconds: A step that takes longer hangs, which all who wait are told.
    """

    def __init__(
        self,
        core: EngineCore,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        step_timeout_seconds: float = 600,
    ) -> None:
        self._core = core
        self._model = model
        self._tokenizer = tokenizer
        self._tracer = Tracer(core.timer)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._inboxes = Inboxes()
        self._readers: set[Inbox | PlannerInquiry] = set()
        self._listeners: list[StatsListener] = []
        self._dead = ""
        # Taken for _dead and to add a reader, so that nobody begins to wait behind what was told to all.
        self._death_lock = threading.Lock()
        self._watchdog = Watchdog(step_timeout_seconds, self._tell_of_hang)
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    @property
    def model(self) -> ModelInfo:
        """See EngineClient."""
        return self._model

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()
        self._watchdog.start()

    def stop(self, reason: str) -> None:
        """Has the engine thread end after the step it is in; requests still open get EngineDead."""
        self._commands.put(Close(reason))

    def close(self) -> None:
        """Ends the engine thread and waits for it, unless it hangs."""
        self.stop("the engine was closed")
        if self._thread.ident is None:
            self._die("the engine was closed before it was started")
            return
        while self._thread.is_alive() and not self._watchdog.complaint:
            self._thread.join(CLOSING_LOOK_SECONDS)
        if self._thread.is_alive():
            logger.error("%s; it is left behind", self._watchdog.complaint)

    def subscribe(self, listener: StatsListener) -> None:
        """See EngineClient."""
        self._listeners.append(listener)

    def health(self) -> EngineHealth:
        """See EngineClient."""
        reason = self._dead or self._watchdog.complaint
        return EngineHealth(alive=not reason, reason=reason)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """See EngineClient."""
        inbox = Inbox()
        matcher = None
        if params.constraint is not None:
            matcher = await asyncio.to_thread(self._core.limits.grammars.compile, params.constraint)
        with self._death_lock:
            self._require_alive()
            self._readers.add(inbox)
            self._commands.put(Add(request_id, prompt_token_ids, params, matcher, inbox))
        is_open = True
        try:
            while is_open:
                outputs = await inbox.take()
                is_open = outputs[-1].finish_reason is None
                yield outputs
        finally:
            self._readers.discard(inbox)
            if is_open:
                # After an error as well: an engine that hung has the request still, should it come to.
                self._commands.put(Abort(request_id, inbox))

    async def abort(self, request_id: str) -> None:
        """See EngineClient."""
        self._commands.put(Abort(request_id))

    async def trace(self, num_steps: int) -> bytes:
        """See EngineClient."""
        with self._death_lock:
            self._require_alive()
            answer = self._tracer.ask(num_steps)
        return await asyncio.to_thread((await asyncio.wrap_future(answer)).export)

    async def planner_report(self) -> PlannerReport:
        """See EngineClient."""
        inquiry = PlannerInquiry()
        with self._death_lock:
            self._require_alive()
            self._readers.add(inquiry)
            self._commands.put(inquiry)
        try:
            return await asyncio.wrap_future(inquiry.answer)
        finally:
            self._readers.discard(inquiry)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See EngineClient."""
        tokenizer = self._require_tokenizer()
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

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

    def _require_alive(self) -> None:
        health = self.health()
        if not health.alive:
            raise EngineDead(health.reason)

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineError("the model has no tokenizer: send the prompt as token ids")
        return self._tokenizer

    def _run(self) -> None:
        """The engine thread."""
        try:
            while (closing := self._obey()) is None:
                if self._core.has_work:
                    self._tracer.before_step()
                    self._step()
                    self._tracer.after_step()
                self._report()
            reason = closing.reason
        except BaseException as error:
            # Not even an exit may pass: above a thread is nobody who could tell the clients.
            logger.exception("the engine loop died")
            reason = f"the engine loop died: {error}"
        self._die(reason)
        self._watchdog.close()

    def _obey(self) -> Close | None:
        """Carries out all queued commands, waiting for one if there is nothing else to do.

        Returns:
            The command to end, if it came.
        """
        block = not self._core.has_work
        timer = self._core.timer
        self._watchdog.beat()
        timer.enter(StepPart.COMMANDS)
        if block:
            timer.leave()  # Waiting is no part of a step.
            self._watchdog.rest()
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return None
            self._watchdog.beat()
            timer.enter(StepPart.COMMANDS)
            block = False
            match command:
                case Add():
                    self._add(command)
                case Abort():
                    self._abort(command)
                case PlannerInquiry():
                    command.settle(self._core.planner_report)
                case Close():
                    return command

    def _add(self, command: Add) -> None:
        if self._inboxes.get(command.request_id) is not None:
            command.inbox.refuse(InvalidRequest(f"request id {command.request_id} is in use"))
            return
        self._inboxes.open(command.request_id, command.inbox)
        try:
            self._core.add_request(
                command.request_id, command.prompt_token_ids, command.params, command.matcher
            )
        except EngineError as error:
            self._inboxes.deliver({command.request_id: error})
        except Exception:
            logger.exception("request %s failed on its way in; the engine goes on", command.request_id)
            self._inboxes.deliver({command.request_id: _failure()})

    def _abort(self, command: Abort) -> None:
        if command.inbox is None or command.inbox is self._inboxes.get(command.request_id):
            output = self._core.abort(command.request_id)
            if output is not None:
                self._inboxes.deliver({command.request_id: output})

    def _step(self) -> None:
        try:
            outputs = self._core.step(self._inboxes.deliver_held)
        except Exception:
            failed = self._core.abandon_step()
            if not failed:
                raise  # Whatever is wrong, it would go wrong again: there is nobody to end.
            logger.exception("a step failed; the requests in it are ended, the engine goes on")
            self._inboxes.deliver(dict.fromkeys(failed, _failure()))
            return
        self._core.timer.enter(StepPart.OUTPUT)
        if any(output.finish_reason for output in outputs):
            self._report()  # Whoever has an answer finds it counted.
        waits = self._core.launches_early and self._core.has_work
        put = self._inboxes.hold if waits else self._inboxes.deliver
        put({output.request_id: output.error or output for output in outputs})

    def _report(self) -> None:
        stats = self._core.take_stats()
        for listener in self._listeners:
            listener(stats)

    def _tell_of_hang(self, complaint: str) -> None:
        """Tells every waiting client, from the watchdog's thread."""
        logger.error("%s; %d open requests are ended", complaint, len(self._readers))
        self._tell_all(complaint)

    def _die(self, reason: str) -> None:
        """Tells every waiting client, and every later one."""
        self._inboxes.deliver_held()
        with self._death_lock:
            self._dead = reason
        self._tell_all(reason)
        self._tracer.drop()

    def _tell_all(self, reason: str) -> None:
        """Tells all who wait that nothing comes; one who hears it twice has stopped to listen."""
        with self._death_lock:
            for reader in tuple(self._readers):
                reader.refuse(EngineDead(reason))
        self._tracer.give_up(EngineDead(reason))


def _failure() -> RequestFailed:
    return RequestFailed("the request failed inside the engine; the server's log says why")
