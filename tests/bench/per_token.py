"""What does a streamed token cost outside of the forward pass? Processor time of the server's two threads.

    python -m tests.bench.per_token [--streams 8] [--step-ms 17] [--seconds 10] [--weights-mb 64]

The server is whole but for the model: the engine's thread, texts, metrics, HTTP. In the place of a forward
pass its core reads as many bytes as a small model's weights have, which drives everybody's code and data out
of the caches, and sleeps until the step is due. Counted is the processor time of either thread, system calls
included and that reading left out, so that a busy machine disturbs it little. A client in a process of its
own reads the streams.
"""

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np

from engine.async_engine import AsyncEngine
from engine.core.stopping import Stop
from engine.engine_core import EngineCore
from engine.output_processor import OutputProcessor
from engine.outputs import FinishReason, RequestOutput, StepPart, StepStats
from engine.sampling_params import SamplingParams
from engine.step_recorder import RequestRecord, StepRecorder
from engine.step_timer import StepTimer
from engine.tokenizer import Tokenizer
from server.app import AppSettings, create_app
from server.listening import SWITCH_SECONDS
from tests.bench.edge import line, start, tell
from tests.fakes import FakeEngine
from tests.server.conftest import new_metrics
from tests.server.running import running_server
from tests.tiny import byte_tokenizer

_TEXT = b"tokens and "


class SleepingCore:
    """What AsyncEngine asks of an engine core; a step reads, sleeps and brings each request a token."""

    launches_early = False

    def __init__(self, tokenizer: Tokenizer, step_seconds: float, megabytes: int) -> None:
        self.timer = StepTimer(time.perf_counter)
        self.reading_seconds = 0.0
        self.num_tokens = 0
        self._outputs = OutputProcessor(tokenizer)
        self._records: dict[str, RequestRecord] = {}
        self._recorder = StepRecorder()
        self._step_seconds = step_seconds
        self._due = 0.0
        self._weights = np.zeros(megabytes * 2**18, np.float32)

    @property
    def has_work(self) -> bool:
        return bool(self._records)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, matcher: None
    ) -> None:
        self._outputs.add(request_id, params, prompt_token_ids)
        self._records[request_id] = RequestRecord(time.perf_counter())

    def abort(self, request_id: str) -> RequestOutput | None:
        self._outputs.remove(request_id)
        if self._records.pop(request_id, None) is None:
            return None
        return RequestOutput(request_id, finish_reason=FinishReason.ABORT)

    def step(self, meanwhile: Callable[[], None]) -> list[RequestOutput]:
        self.timer.enter(StepPart.FORWARD)
        began = time.thread_time()
        self._weights.sum()
        self.reading_seconds += time.thread_time() - began
        now = time.perf_counter()
        self._due = max(self._due + self._step_seconds, now)
        time.sleep(self._due - now)
        self._recorder.num_target_forwards += 1
        outputs = [self._output(*item) for item in self._records.items()]
        self.timer.leave()
        return outputs

    def take_stats(self) -> StepStats:
        self._recorder.part_seconds = self.timer.take()
        stats = self._recorder.build(len(self._records), 0, 0.5)
        self._recorder = StepRecorder()
        return stats

    def _output(self, request_id: str, record: RequestRecord) -> RequestOutput:
        run = (_TEXT[record.num_steps % len(_TEXT)],)
        self.num_tokens += 1
        self.timer.enter(StepPart.STOP)
        processed = self._outputs.process(request_id, run, Stop(1))
        self.timer.enter(StepPart.COMMIT)
        self._recorder.committed(record, 1, 0, 0, time.perf_counter())
        self.timer.enter(StepPart.OUTPUT)
        return RequestOutput(
            request_id,
            token_ids=run,
            text=processed.text,
            num_prompt_tokens=8,
            num_output_tokens=record.num_committed_tokens,
            speculation=record.stats(),
        )


def main() -> None:
    options = parse()
    if options.serve:
        serve(options)
    else:
        report(options)


def parse() -> argparse.Namespace:
    name = "python -m tests.bench.per_token"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=17)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--weights-mb", type=int, default=64)
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Serves until its input closes; says its URL, and for each line of input what was used so far."""
    tokenizer = Tokenizer(byte_tokenizer())
    core = SleepingCore(tokenizer, options.step_ms / 1000, options.weights_mb)
    model = replace(FakeEngine().model, max_model_len=10**6)
    engine = AsyncEngine(cast(EngineCore, core), model, tokenizer)
    app = create_app(engine, AppSettings(), new_metrics(engine))
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    engine.start()
    with running_server(app) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            sys.stdout.write(" ".join(map(str, used(core))) + "\n")
            sys.stdout.flush()


def used(core: SleepingCore) -> tuple[int, float, float]:
    """Tokens so far, and processor seconds of the event loop's thread and of the engine's."""
    clocks = {
        thread.name.split()[0]: time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.ident is not None
    }
    loop, engine = (time.clock_gettime(clocks[name]) for name in ("server", "outrider-engine"))
    return core.num_tokens, loop, engine - core.reading_seconds


def report(options: argparse.Namespace) -> None:
    server = start(
        "per_token",
        "--serve",
        f"--step-ms={options.step_ms}",
        f"--weights-mb={options.weights_mb}",
    )
    loader = None
    try:
        loader = start("edge", "load", f"--streams={options.streams}", f"--url={line(server)}")
        for _ in range(3):
            line(loader)
        seen = []
        for _ in range(options.seconds + 1):
            tell(server)
            seen.append([float(word) for word in line(server).split()])
            time.sleep(1)
    finally:
        for process in filter(None, (loader, server)):
            process.kill()
            process.communicate()
    sys.stdout.write(f"{options.streams} streams, {seen[-1][0] - seen[0][0]:.0f} tokens; ")
    for place, whose in ((1, "event loop"), (2, "engine")):
        costs = [1e6 * (new[place] - old[place]) / (new[0] - old[0]) for old, new in pairwise(seen)]
        sys.stdout.write(f"{whose}: {statistics.median(costs):.0f} us a token, {min(costs):.0f} at best; ")
    sys.stdout.write("in windows of a second\n")


if __name__ == "__main__":
    main()
