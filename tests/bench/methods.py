"""Tokens per second, acceptance and tokens per forward of every method, side by side over the same weights.

    python -m tests.bench.methods --model M [--draft-model D [--draft-vocab-size N ...]] [--eagle HEAD]
        [--medusa HEADS] [--lookup ngram] [--prompts FILE ...] [--per-kind N]

Where `outrider bench --paired` compares a server with itself, this compares the methods with each other, in
process. Every prompt is answered by each of them in turn, so that a machine whose speed drifts slows all
alike; speed-ups are ratios of such neighbours, and figures are given per kind of prompt as well. Texts are
compared with the plain run's, and where one differs, the gap between the two best logits at that place is
shown: a near-tie or a bug.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config import (
    CacheConfig,
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SchedulerConfig,
    SpeculationConfig,
    SuffixSpeculation,
)
from engine.factory import assemble
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.llm import LLM, Completion
from engine.model.loader import load_causal_lm
from engine.sampling_params import SamplingParams
from engine.speculation.factory import load_drafts
from engine.tokenizer import Tokenizer
from server.bench.prompts import Prompt, own_prompts, read_prompts, take


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt as the engine gets it."""

    name: str
    token_ids: list[int]
    kind: str = ""


@dataclass(slots=True)
class Figures:
    """What one method did."""

    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    differing: list[str] = field(default_factory=list)


def main() -> None:
    """Runs the benchmark."""
    options = parse()
    engines = build(options)
    tokenizer = next(iter(engines.values())).tokenizer
    asked = [prompt for path in options.prompts or () for prompt in read_prompts(path)] or own_prompts()
    asked = take(asked, options.num_prompts) if options.per_kind is None else of_each(asked, options.per_kind)
    prompts = [BenchPrompt(prompt.name, encode(prompt, tokenizer), prompt.kind) for prompt in asked]
    wishes = SamplingParams(temperature=options.temperature, seed=0, max_tokens=options.max_tokens)
    for llm in engines.values():
        llm.generate([prompts[0].token_ids], replace(wishes, max_tokens=8))
    figures = {method: Figures() for method in engines}
    by_kind = {(method, prompt.kind): Figures() for method in engines for prompt in prompts}
    for prompt in prompts:
        answers = {method: run(llm, prompt, wishes) for method, llm in engines.items()}
        for method, (answer, speed) in answers.items():
            for each in (figures[method], by_kind[method, prompt.kind]):
                enter(each, answer, speed, answers["none"][1])
            if answer.token_ids != answers["none"][0].token_ids:
                gap = explain(engines["none"], prompt, answers["none"][0], answer)
                figures[method].differing.append(f"{prompt.name}: {gap}")
        say(prompt.name, answers)
    report(figures, len(prompts))
    report_kinds(by_kind)


def of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of each kind, or all there are."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    return [prompt for own in kinds.values() for prompt in take(own, min(count, len(own)))]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.methods", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--draft-model", help="adds the method draft_model")
    parser.add_argument(
        "--draft-vocab-size", nargs="+", default=["auto"], help="of the draft model; several are compared"
    )
    parser.add_argument(
        "--no-draft-rounding", action="store_true", help="hold the draft model's layers as its file has them"
    )
    parser.add_argument("--eagle", metavar="HEAD", help="adds the method eagle")
    parser.add_argument("--medusa", metavar="HEADS", help="adds the method medusa")
    parser.add_argument("--tree", help="of the heads, instead of a chain")
    parser.add_argument("--num-draft-tokens", type=int, help="default: each method's own")
    parser.add_argument("--planner", choices=("auto", "fixed"), default="fixed", help="default: fixed")
    parser.add_argument(
        "--lookup", choices=("none", "ngram", "suffix"), default="none", help="before models and heads"
    )
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help=".json or .jsonl files; default: four of our own"
    )
    parser.add_argument("--per-kind", type=int, metavar="N", help="so many prompts of each kind")
    parser.add_argument("--num-prompts", type=int, help="default: each once")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """As a conversation where prompt and model allow it, else as a text."""
    if prompt.messages is not None and (tokenizer.has_chat_template or prompt.text is None):
        return tokenizer.apply_chat_template(prompt.messages)
    assert prompt.text is not None
    return tokenizer.encode(prompt.text)


def build(options: argparse.Namespace) -> dict[str, LLM]:
    """One engine per method over the same weights. Prompts are read anew each time: no prefix cache."""
    model = ModelConfig(model=options.model, max_model_len=options.max_model_len)
    target = load_causal_lm(model)
    length: dict[str, Any] = {"planner": options.planner}
    if options.num_draft_tokens is not None:
        length["num_draft_tokens"] = options.num_draft_tokens
    shape = length if options.tree is None else {"tree": options.tree, "planner": options.planner}
    shape = {"lookup": options.lookup, **shape}
    methods: list[SpeculationConfig] = [
        NoSpeculation(),
        NgramSpeculation(**length),
        SuffixSpeculation(**length),
    ]
    if options.draft_model:
        own = {"draft_model": options.draft_model, "lookup": options.lookup, **length}
        own["draft_rounding"] = not options.no_draft_rounding
        methods += [DraftModelSpeculation(**own, draft_vocab_size=size) for size in options.draft_vocab_size]
    if options.eagle:
        methods.append(EagleSpeculation(head=options.eagle, **shape))
    if options.medusa:
        methods.append(MedusaSpeculation(head=options.medusa, **shape))
    engines: dict[str, LLM] = {}
    method, drafts = "none", load_drafts(NoSpeculation(), target, model)
    for speculation in methods:
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=1),
            speculation=speculation,
        )
        if speculation.method != method:
            method, drafts = speculation.method, load_drafts(speculation, target, model)
        calibrates = options.planner == "auto"
        engines[name_of(speculation, options)] = LLM(assemble(config, target, drafts, calibrates=calibrates))
    return engines


def name_of(speculation: SpeculationConfig, options: argparse.Namespace) -> str:
    """The method; with its vocabulary, where several are compared."""
    match speculation:
        case DraftModelSpeculation(draft_vocab_size=size) if len(options.draft_vocab_size) > 1:
            return f"draft, {size}"
        case _:
            return speculation.method


def run(llm: LLM, prompt: BenchPrompt, wishes: SamplingParams) -> tuple[Completion, float]:
    """One answer, and its tokens per second, the reading of the prompt included."""
    began = time.perf_counter()
    [answer] = llm.generate([prompt.token_ids], wishes)
    return answer, len(answer.token_ids) / (time.perf_counter() - began)


def enter(figures: Figures, answer: Completion, speed: float, plain_speed: float) -> None:
    """Adds one answer to its method's figures."""
    stats = answer.speculation
    figures.speeds.append(speed)
    figures.ratios.append(speed / plain_speed)
    figures.drafted += stats.num_draft_tokens
    figures.accepted += stats.num_accepted_tokens
    figures.steps += stats.num_steps
    figures.tokens += stats.num_committed_tokens


def explain(plain: LLM, prompt: BenchPrompt, expected: Completion, got: Completion) -> str:
    """Where two answers part, and how close the plain run's two best logits were there."""
    pairs = zip(expected.token_ids, got.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(got.token_ids))
    before = [*prompt.token_ids, *expected.token_ids[:place]]
    [probe] = plain.generate([before], SamplingParams(temperature=0.0, max_tokens=1, logprobs=2))
    first, second = probe.logprobs[0].top
    return (
        f"differs from token {place} on; there {first.token!r} leads {second.token!r} "
        f"by {first.logprob - second.logprob:.6f} nats"
    )


def say(name: str, answers: dict[str, tuple[Completion, float]]) -> None:
    """One line per prompt while it goes on."""
    parts = [f"{method} {speed:6.1f} tokens/s" for method, (_, speed) in answers.items()]
    sys.stdout.write(f"{name:20} {'   '.join(parts)}\n")
    sys.stdout.flush()


def report(figures: dict[str, Figures], num_prompts: int) -> None:
    """The table."""
    head = ("method", "tokens/s", "x plain", "(min-max)", "acceptance", "tokens/forward", "same text")
    lines = ["", "{:12} {:>9} {:>8} {:>12} {:>11} {:>15} {:>10}".format(*head)]
    for method, f in figures.items():
        acceptance = f"{f.accepted / f.drafted:.2f}" if f.drafted else "-"
        lines.append(
            f"{method:12} {statistics.median(f.speeds):9.1f} {statistics.median(f.ratios):8.2f} "
            f"{f'{min(f.ratios):.2f}-{max(f.ratios):.2f}':>12} {acceptance:>11} {f.tokens / f.steps:15.2f} "
            f"{f'{num_prompts - len(f.differing)}/{num_prompts}':>10}"
        )
    for method, f in figures.items():
        lines.extend(f"{method}, {place}" for place in f.differing)
    sys.stdout.write("\n".join(lines) + "\n")


def report_kinds(figures: dict[tuple[str, str], Figures]) -> None:
    """Tokens per forward, and speed over plain decoding, by kind of prompt."""
    kinds, methods = (list(dict.fromkeys(key[place] for key in figures)) for place in (1, 0))
    lines = ["", f"{'tokens/forward (x plain)':28}" + "".join(f"{method:>16}" for method in methods)]
    for kind in kinds:
        own = [figures[method, kind] for method in methods]
        cells = [f"{f.tokens / f.steps:.2f} ({statistics.median(f.ratios):.2f})" for f in own]
        lines.append(f"{f'{kind} ({len(own[0].speeds)})':28}" + "".join(f"{cell:>16}" for cell in cells))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
