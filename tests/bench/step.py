"""What a step costs: checking 1, 2, ... tokens, several requests, and sampling, beside the machine's memory.

    python -m tests.bench.step [--model M] [--dtype int8] [--rows 1,2,4,5,6,8,16] [--context 200,2000]
                               [--kv-cache-dtype float32,float16]

A step here is what the engine does between two tokens, scheduling left out: the batch is built, the target
runs over it, tokens are chosen. Everything that is compared is timed in turn, round after round, so that a
machine whose speed drifts slows all alike. Figures are medians over the rounds, ratios medians of the
rounds' own ratios. The memory limit is the bytes of weights that one row reads over what a read loop over
1 GiB reaches in the same rounds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from engine.config import KVCacheDType, ModelConfig
from engine.model.attention.choice import choose_backend
from engine.model.cache_type import choose_cache_type
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.model_runner import ModelRunner
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling_params import SamplingParams
from engine.token_tree import TokenTree

BLOCK_SIZE = 16
WARM_UP = 3
READ_BYTES = 2**30
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
GREEDY = SamplingParams(temperature=0.0, seed=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step.

    Attributes:
        requests: How many take part.
        rows: Tokens of each: the last one and a chain of drafts.
        context: Tokens of each before that.
        cache: Type of keys and values.
        params: How tokens are chosen.
    """

    requests: int
    rows: int
    context: int
    cache: KVCacheDType = "auto"
    params: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a step, and those of them that went into choosing tokens."""

    total: float
    choosing: float = 0.0


Times = dict[object, list[Spent]]


class Bench:
    """A model, and steps of it to be timed.

    Args:
        model: The model.
        longest: Tokens of the longest context.
        most: Requests of the largest batch.
        caches: Types of keys and values; there is a cache of each.
    """

    def __init__(self, model: LoadedModel, longest: int, most: int, caches: Sequence[KVCacheDType]) -> None:
        self._vocab_size = model.vocab_size
        self._blocks = -(-(longest + 64) // BLOCK_SIZE)
        self._runners = {wanted: self._runner(model, most, wanted) for wanted in caches}
        self._sampler = Sampler(model.operators)

    def _runner(self, model: LoadedModel, most: int, wanted: KVCacheDType) -> ModelRunner:
        dtype = choose_cache_type(wanted, model)
        cache = PagedKVCache(model.layers, most * self._blocks, BLOCK_SIZE, dtype, model.device)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()  # Also so that no page is touched for the first time while it is timed.
        return ModelRunner(
            model.module,
            cache,
            choose_backend(model.operators, model.device),
            model.vocab_size,
            weights=model.weights,
            operators=model.operators,
        )

    def step(self, case: Case) -> Spent:
        """Makes one."""
        runner = self._runners[case.cache]
        with runner.threads:
            return self._step(case, runner)

    def _step(self, case: Case, runner: ModelRunner) -> Spent:
        began = time.perf_counter()
        chance = range(7, 7 + case.rows)
        tree = TokenTree.chain([1000 * token % self._vocab_size for token in chance[1:]])
        slices = []
        for request in range(case.requests):
            table = range(request * self._blocks, (request + 1) * self._blocks)
            slices.append(SequenceSlice([chance[0]], case.context - 1, table, tree, case.rows))
        rows = runner.forward(runner.build(slices))
        computed = time.perf_counter()
        tokens = [*range(1, case.context), chance[0]]
        task = SamplingTask(case.params, tokens, len(tokens) - 1, tree, frozenset())
        self._sampler(rows, [task] * case.requests)
        ended = time.perf_counter()
        return Spent(ended - began, ended - computed)


def main() -> None:
    """Prints the tables."""
    options = parse()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    config = ModelConfig(model=options.model, dtype=options.dtype, device="cpu", offline=True)
    model = load_causal_lm(config)
    bench = Bench(model, max(options.context), options.batch, options.kv_cache_dtype)
    first_cache, *other_caches = options.kv_cache_dtype
    single = [Case(1, rows, context, first_cache) for context in options.context for rows in options.rows]
    counts = powers_up_to(options.batch)
    batch = [Case(count, 1, context, first_cache) for context in options.context for count in counts]
    chosen = [Case(options.batch, 1, options.context[0], first_cache, params) for params in (GREEDY, SAMPLED)]
    compared = list(dict.fromkeys([*single, *batch]))
    others = [replace(case, cache=cache) for cache in other_caches for case in compared]
    cases = list(dict.fromkeys([*compared, *chosen, *others]))
    works: dict[object, Callable[[], Spent]] = {case: partial(bench.step, case) for case in cases}
    # Behind a read loop torch's threads are awake for a while yet, and no weight is in the cache.
    first: dict[object, Callable[[], Spent]] = {
        "read": partial(read, torch.ones(READ_BYTES // 4)),
        "settle": partial(bench.step, cases[0]),
    }
    times = measure({**first, **works}, options.rounds)
    say(f"{options.model}: {torch.get_num_threads()} threads, {options.rounds} rounds")
    for line in (
        *curve(times, single, options.rows, options.context),
        *batches(times, batch),
        *by_cache(times, compared, others),
        *sampling(times, chosen),
        *limit(times, single[0], weight_bytes(model.module)),
    ):
        say(line)


def parse() -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.step", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 5, 6, 8, 16], help="tokens to check")
    parser.add_argument("--context", type=numbers, default=[200, 2000], help="tokens before them")
    parser.add_argument(
        "--kv-cache-dtype",
        type=lambda text: text.split(","),
        default=["auto"],
        help="types of keys and values; others are compared with the first",
    )
    parser.add_argument("--batch", type=int, default=8, help="requests of the largest batch")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    options = parser.parse_args()
    options.rows = sorted({1, *options.rows})
    return options


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def read(memory: torch.Tensor) -> Spent:
    """Reads it once."""
    began = time.perf_counter()
    memory.sum()
    return Spent(time.perf_counter() - began)


def measure(works: dict[object, Callable[[], Spent]], rounds: int) -> Times:
    """What each work took in each round; every round does all of them in turn."""
    for work in works.values():
        for _ in range(WARM_UP):
            work()
    times: Times = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(work())
    return times


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights that every row reads: all linear layers, the head with them."""
    total = 0
    for part in module.modules():
        if not hasattr(part, "out_features"):
            continue
        own = {**vars(part), **dict(part.named_parameters(recurse=False))}
        tensors = [value for value in own.values() if isinstance(value, torch.Tensor) and value.dim() > 1]
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # FBGEMM's packed matrices show no tensor; they are of float16.
        total += held or 2 * int(part.in_features) * int(part.out_features)  # type: ignore[arg-type]
    return total


def curve(times: Times, cases: Sequence[Case], rows: Sequence[int], contexts: Sequence[int]) -> Iterator[str]:
    """Checking n tokens of one request, over checking one."""
    yield "\none request, greedy: milliseconds (times one token)"
    yield f"{'context':>8}" + "".join(f"{f'{count} tokens':>16}" for count in rows)
    for context in contexts:
        own = [case for case in cases if case.context == context]
        cells = [f"{milliseconds(times[case]):.1f} ({ratio(times[case], times[own[0]]):.2f})" for case in own]
        yield f"{context:8}" + "".join(f"{cell:>16}" for cell in cells)


def batches(times: Times, cases: Sequence[Case]) -> Iterator[str]:
    """Several requests, a token each."""
    yield "\nrequests of one token each, greedy: milliseconds (times one request)"
    for context in dict.fromkeys(case.context for case in cases):
        own = [case for case in cases if case.context == context]
        cells = (
            f"{case.requests}: {milliseconds(times[case]):.1f} ({ratio(times[case], times[own[0]]):.2f})"
            for case in own
        )
        yield f"{context:8}  " + "  ".join(cells)


def by_cache(times: Times, cases: Sequence[Case], others: Sequence[Case]) -> Iterator[str]:
    """The same steps over caches of other types."""
    for other in others:
        case = replace(other, cache=cases[0].cache)
        if case == cases[0]:
            yield f"\n{other.cache} keys and values: milliseconds (times {case.cache})"
        yield (
            f"  {case.requests} x {case.rows} tokens behind {case.context}: {milliseconds(times[other]):.1f} "
            f"({ratio(times[other], times[case]):.3f})"
        )


def sampling(times: Times, cases: Sequence[Case]) -> Iterator[str]:
    """What choosing tokens takes."""
    yield f"\nchoosing tokens for {cases[0].requests} requests, over the rest of the step"
    for case in cases:
        name = f"temperature {case.params.temperature:g}, top_p {case.params.top_p:g}"
        own = 1000 * statistics.median(spent.choosing for spent in times[case])
        share = statistics.median(spent.choosing / (spent.total - spent.choosing) for spent in times[case])
        yield f"  {name}: {own:.2f} ms, {share:.1%}"


def limit(times: Times, case: Case, num_bytes: int) -> Iterator[str]:
    """How near one row comes to what memory allows."""
    bandwidth = READ_BYTES * 1000 / milliseconds(times["read"])
    least = 1000 * num_bytes / bandwidth
    yield "\nmemory"
    yield f"  a read loop over 1 GiB: {bandwidth / 1e9:.1f} GB/s"
    yield f"  weights read per step: {num_bytes / 1e6:.0f} MB, at that rate {least:.1f} ms"
    own = milliseconds(times[case])
    yield f"  one token: {own:.1f} ms, {least / own:.2f} of the limit"


def ratio(own: Sequence[Spent], base: Sequence[Spent]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a.total / b.total for a, b in zip(own, base, strict=True))


def milliseconds(spent: Sequence[Spent]) -> float:
    """The median."""
    return 1000 * statistics.median(each.total for each in spent)


def say(line: str) -> None:
    """One line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
