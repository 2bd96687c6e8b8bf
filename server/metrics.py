"""Prometheus metrics: vLLM's names under the prefix `outrider_`, and what only a speculating server has.

The number of series is fixed once the routes are known: every label takes its values from a closed set
and all combinations exist from the start. So a scrape cannot grow, `increase()` sees the first event of
each kind, and a fresh server shows zeros. Ratios are left to the reader, who divides counters:

    acceptance rate     spec_decode_num_accepted_tokens_total / spec_decode_num_draft_tokens_total
    tokens per forward  committed_tokens_total / target_forwards_total, all requests of a batch together
    ... of one request  committed_tokens_total / request_forwards_total, 1 without speculation
    acceptance length   1 + spec_decode_num_accepted_tokens_total / spec_decode_num_drafts_total
"""

import platform
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from engine.outputs import FinishReason, StepPart, StepStats
from server import __version__
from server.metric_family import STEP_BUCKETS, Backlog, EngineFamily
from server.planner_metrics import PlannerMetrics

OTHER = "other"
HTTP_STATUSES = (200, 400, 401, 403, 404, 405, 413, 415, 422, 429, 499, 500, 503)

TOKEN_BUCKETS = (
    *(0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
WAIT_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
LENGTH_BUCKETS = tuple(float(2**power) for power in range(18))
DRAFT_BUCKETS = tuple(float(count) for count in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 63))


class Metrics:
    """All metrics of one server, on a registry of its own.

    Args:
        model_name: The name the model is served under.
        method: The speculation method the engine was built with; a label of all the engine's metrics.
        max_draft_tokens: Draft nodes per step that the server was set to. Acceptance is counted per draft
            position up to it; what a request asked beyond shares the last one, labelled "N+".
        weights: Type of the model's weights.
        probed_acceptance: Share of draft tokens accepted in the trial at start; None if there was none.
    """

    def __init__(
        self,
        *,
        model_name: str,
        method: str = "none",
        max_draft_tokens: int = 0,
        weights: str = "",
        probed_acceptance: float | None = None,
    ) -> None:
        # A creation time beside every counter lengthens the scrape and tells nobody anything.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._backlog = Backlog(self.registry, self._count)
        self._max_draft_tokens = max_draft_tokens
        family = EngineFamily(self.registry, model_name, method)
        self._add_load(family)
        self._add_requests(family)
        self._add_speculation(family)
        if probed_acceptance is not None:
            text = "Share of draft tokens accepted in the trial at start; near 0: a draft of another model."
            family.gauge("spec_decode_probed_acceptance", text).set(probed_acceptance)
        self._add_http()
        ProcessCollector(registry=self.registry)
        build = Info("outrider_build", "What runs here.", registry=self.registry)
        build.info({"version": __version__, "python": platform.python_version()})
        model = Info("outrider_model", "The model that is served.", registry=self.registry)
        model.info({"model_name": model_name, "weights": weights})

    def _add_load(self, family: EngineFamily) -> None:
        self._running = family.gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = family.gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = family.gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is full.")
        self._prefix_queries = family.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = family.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = family.counter(
            "num_preemptions", "Requests put back to wait for want of KV blocks."
        )
        self._prompt_tokens = family.counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = family.counter("generation_tokens", "Tokens generated.")

    def _add_requests(self, family: EngineFamily) -> None:
        self._finished = family.counters(
            "request_success", "Requests that ended, by reason.", "finished_reason", list(FinishReason)
        )
        self._ttft = family.histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", WAIT_BUCKETS
        )
        self._inter_token = family.histogram(
            "inter_token_latency_seconds",
            "Time between tokens; of tokens that come together each counts with its share.",
            TOKEN_BUCKETS,
        )
        self._e2e = family.histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS
        )
        self._queue = family.histogram(
            "request_queue_time_seconds", "From arrival to being scheduled first.", WAIT_BUCKETS
        )
        self._prompt_length = family.histogram(
            "request_prompt_tokens", "Tokens of a request's prompt.", LENGTH_BUCKETS
        )
        self._output_length = family.histogram(
            "request_generation_tokens", "Tokens of a request's answer.", LENGTH_BUCKETS
        )

    def _add_speculation(self, family: EngineFamily) -> None:
        self._forwards = family.counter("target_forwards", "Forward passes of the target model.")
        self._request_forwards = family.counter(
            "request_forwards", "Forward passes, counted once for each request they brought tokens for."
        )
        self._committed = family.counter(
            "committed_tokens",
            "Tokens committed to answers; over request_forwards_total: one request's tokens per forward, "
            "which is 1 without speculation; over target_forwards_total: the whole batch's.",
        )
        self._drafts = family.counter("spec_decode_num_drafts", "Drafts checked.")
        self._draft_tokens = family.counter("spec_decode_num_draft_tokens", "Draft tokens checked.")
        self._accepted_tokens = family.counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted, bonus tokens not among them."
        )
        self._positions = [str(position) for position in range(self._max_draft_tokens)]
        self._positions.append(f"{self._max_draft_tokens}+")
        self._accepted_at = family.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            "position",
            self._positions,
        )
        self._accepted_length = family.histogram(
            "spec_decode_accepted_length", "Draft tokens accepted per draft.", DRAFT_BUCKETS
        )
        self._outgrown = family.counter(
            "spec_decode_outgrown_requests",
            "Requests that outgrew the draft's context and went on without it.",
        )
        self._lossy = family.counter(
            "spec_decode_lossy_requests",
            "Requests that ended under typical acceptance, which changes what the model says.",
        )
        self._planner = PlannerMetrics(family)
        self._propose = family.histogram("propose_seconds", "Time a step spent drafting.", STEP_BUCKETS)
        self._forward = family.histogram("forward_seconds", "Time of a step's target forward.", STEP_BUCKETS)
        self._sample = family.histogram(
            "sample_seconds", "Time a step spent choosing and verifying tokens.", STEP_BUCKETS
        )
        self._parts = family.counters(
            "step_seconds", "Time spent in steps, by the part of a step.", "part", list(StepPart)
        )

    def _add_http(self) -> None:
        self._http_routes: set[tuple[str, str]] = set()
        self._http_requests = Counter(
            "outrider_http_requests",
            "Answered HTTP requests.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._http_duration = Histogram(
            "outrider_http_request_duration_seconds",
            "From a request's head to the last byte of its answer.",
            ("route", "method"),
            registry=self.registry,
            buckets=REQUEST_BUCKETS,
        )
        self.watch_routes([(OTHER, OTHER)])

    def watch_routes(self, routes: Iterable[tuple[str, str]]) -> None:
        """Makes the series of the app's routes; requests to anything else share one label value.

        Args:
            routes: Pairs of route template and HTTP method, such as ("/v1/models/{model}", "GET").
        """
        for route, method in routes:
            self._http_routes.add((route, method))
            self._http_duration.labels(route, method)
            for status in (*map(str, HTTP_STATUSES), OTHER):
                self._http_requests.labels(route, method, status)

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts one answered request.

        Args:
            route: The template of the route that matched; anything else counts as "other".
            method: The HTTP method.
            status: The status sent; 499 for a client that left before there was one.
            seconds: From the request's head to the last byte of the answer.
        """
        if (route, method) not in self._http_routes:
            route = method = OTHER
        code = str(status) if status in HTTP_STATUSES else OTHER
        self._http_requests.labels(route, method, code).inc()
        self._http_duration.labels(route, method).observe(seconds)

    def listener(self, stats: StepStats) -> None:
        """Adds one step; give it to `EngineClient.subscribe`. Safe on any thread.

        A few steps may wait to be counted together; to those who read the registry none does.
        """
        self._backlog.add(stats)

    def _count(self, stats: StepStats) -> None:
        """Counts a step.

        The method's label is the one the server was built with: a step of an engine of another method
        cannot happen, and a step that drafted nothing still belongs to its method.
        """
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        self._prefix_queries.inc(stats.prefix_cache_queries)
        self._prefix_hits.inc(stats.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions)
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._generation_tokens.inc(stats.num_generation_tokens)
        self._count_requests(stats)
        self._count_speculation(stats)

    def _count_requests(self, stats: StepStats) -> None:
        for histogram, values in (
            (self._ttft, stats.ttft_seconds),
            (self._inter_token, stats.inter_token_seconds),
            (self._queue, stats.queue_seconds),
        ):
            for seconds in values:
                histogram.observe(seconds)
        for request in stats.finished:
            self._finished[request.reason].inc()
            self._lossy.inc(not request.is_lossless)
            self._e2e.observe(request.e2e_seconds)
            self._prompt_length.observe(request.num_prompt_tokens)
            self._output_length.observe(request.num_output_tokens)

    def _count_speculation(self, stats: StepStats) -> None:
        self._forwards.inc(stats.num_target_forwards)
        self._request_forwards.inc(stats.num_request_forwards)
        self._committed.inc(stats.num_generation_tokens)
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted_tokens.inc(stats.num_accepted_tokens)
        self._outgrown.inc(stats.num_outgrown)
        for length in stats.accepted_lengths:
            self._accepted_length.observe(length)
            for position in range(length):
                self._accepted_at[self._positions[min(position, self._max_draft_tokens)]].inc()
        self._planner.note(stats.plan)
        for part, seconds in stats.part_seconds.items():
            self._parts[part].inc(seconds)
        if stats.num_target_forwards:
            self._propose.observe(stats.part_seconds.get(StepPart.PROPOSE, 0.0))
            self._forward.observe(stats.part_seconds.get(StepPart.FORWARD, 0.0))
            self._sample.observe(stats.part_seconds.get(StepPart.SAMPLE, 0.0))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The scrape and its content type, in the format the Accept header prefers."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type
