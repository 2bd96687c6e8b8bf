"""Acceptance, tokens per forward and speed of a draft model's chains and trees under each rule, side by side.

    python -m tests.bench.shapes --model M --draft-model D [--prompts FILE ...] [--max-tokens N] [--plot FILE]

Each group of --streams prompts is answered by every combination in turn over the same weights; speed is a
ratio to the plain run of the same prompts and temperature. Under the match rule texts must be equal.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import (
    CacheConfig,
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NoSpeculation,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.factory import assemble
from engine.llm import LLM, Completion
from engine.model.loader import load_causal_lm
from engine.sampling_params import SamplingParams
from engine.speculation.factory import load_drafts
from server.bench.chart import Chart, Series, draw_charts
from server.bench.prompts import own_prompts, read_prompts, take
from tests.bench.methods import BenchPrompt, encode

SHAPES: dict[str, dict[str, Any]] = {
    "chain 4": {"num_draft_tokens": 4},
    "tree 8": {"tree": [2, 1, 1, 1]},
    "tree 16": {"tree": [4, 1, 1, 1]},
    "dynamic 8": {"tree": {"shape": "dynamic", "max_nodes": 8, "max_depth": 5}},
    "dynamic 16": {"tree": {"shape": "dynamic", "max_nodes": 16, "max_depth": 6}},
}
RULES: dict[str, dict[str, Any]] = {
    "match, coupled": {},
    "match, greedy draft": {"draft_sampling": "greedy"},
    "rejection": {"acceptance": "rejection"},
    "block": {"acceptance": "block"},
}


@dataclass(slots=True)
class Figures:
    """What one rule and shape did at one temperature."""

    rule: str
    shape: str
    temperature: float
    llm: LLM
    ratios: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    differing: int = 0

    def enter(self, answers: Sequence[Completion], expected: Sequence[Completion], ratio: float) -> None:
        """Adds a group of answers."""
        self.ratios.append(ratio)
        for answer, plain in zip(answers, expected, strict=True):
            stats = answer.speculation
            self.drafted += stats.num_draft_tokens
            self.accepted += stats.num_accepted_tokens
            self.steps += stats.num_steps
            self.tokens += stats.num_committed_tokens
            self.differing += answer.token_ids != plain.token_ids

    @property
    def tokens_per_forward(self) -> float:
        """Committed per step of the target."""
        return self.tokens / self.steps


def main() -> None:
    """Runs the benchmark."""
    options = parse()
    model = ModelConfig(model=options.model, max_model_len=2048)
    target = load_causal_lm(model)
    drafts = load_drafts(DraftModelSpeculation(draft_model=options.draft_model), target, model)

    def engine(speculation: SpeculationConfig) -> LLM:
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_caching=False, kv_cache_gb=0.5),
            scheduler=SchedulerConfig(max_num_seqs=options.streams),
            speculation=speculation,
        )
        return LLM(assemble(config, target, [] if speculation.method == "none" else drafts))

    plain = engine(NoSpeculation())
    sets = [read_prompts(path) for path in options.prompts or ()] or [own_prompts()]
    asked = [prompt for each in sets for prompt in take(each, options.num_prompts)]
    prompts = [BenchPrompt(prompt.name, encode(prompt, plain.tokenizer)) for prompt in asked]
    figures = [
        Figures(rule, shape, temperature, engine(speculation))
        for rule, shape, temperature, speculation in combinations(options)
    ]
    for temperature in map(float, options.temperatures.split(",")):
        wishes = SamplingParams(
            temperature=temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True
        )
        for begin in range(0, len(prompts), options.streams):
            group = prompts[begin : begin + options.streams]
            expected, plain_seconds = answered(plain, group, wishes)
            for each in figures:
                if each.temperature == temperature:
                    answers, seconds = answered(each.llm, group, wishes)
                    each.enter(answers, expected, plain_seconds / seconds)
            sys.stderr.write(f"temperature {temperature:g}, {', '.join(prompt.name for prompt in group)}\n")
    report(figures, len(prompts))
    if options.plot:
        options.plot.write_bytes(draw_charts(charts([f for f in figures if f.steps])))


def answered(
    llm: LLM, prompts: Sequence[BenchPrompt], wishes: SamplingParams
) -> tuple[list[Completion], float]:
    """The answers to prompts that are asked together, and the seconds they took."""
    began = time.perf_counter()
    answers = llm.generate([prompt.token_ids for prompt in prompts], wishes)
    return answers, time.perf_counter() - began


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shapes", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help=".json or .jsonl files; default: four of our own"
    )
    parser.add_argument("--num-prompts", type=int, help="of each file; default: each once")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--streams", type=int, default=1, help="prompts answered together")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: all")
    parser.add_argument("--temperatures", default="0,1", help="default: 0,1")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    return parser.parse_args()


def combinations(options: argparse.Namespace) -> Iterator[tuple[str, str, float, DraftModelSpeculation]]:
    """Every rule with every shape that it may verify; at temperature 0 all rules are one."""
    for shape in options.shapes.split(","):
        for rule, more in RULES.items():
            selects = shape.startswith("dynamic")
            if (rule == "rejection" and selects) or (rule == "block" and shape != "chain 4"):
                continue
            speculation = DraftModelSpeculation.model_validate(
                # The shape is what is measured, not what a planner makes of it.
                {"draft_model": options.draft_model, "planner": "fixed", **SHAPES[shape], **more}
            )
            if rule == "match, coupled":
                yield "match", shape, 0.0, speculation
            yield rule, shape, 1.0, speculation


def report(figures: list[Figures], num_prompts: int) -> None:
    """The table."""
    head = ("temperature", "rule", "shape", "acceptance", "tokens/forward", "x plain", "(min-max)", "same")
    lines = ["{:>11} {:20} {:11} {:>10} {:>14} {:>8} {:>12} {:>6}".format(*head)]
    lines.extend(
        f"{f.temperature:11g} {f.rule:20} {f.shape:11} {f.accepted / f.drafted:10.2f} "
        f"{f.tokens_per_forward:14.2f} {statistics.median(f.ratios):8.2f} "
        f"{f'{min(f.ratios):.2f}-{max(f.ratios):.2f}':>12} "
        f"{f'{num_prompts - f.differing}/{num_prompts}':>6}"
        for f in figures
        if f.steps
    )
    sys.stdout.write("\n".join(lines) + "\n")


def charts(figures: list[Figures]) -> list[Chart]:
    """Tokens per forward, and speed, over the nodes of a tree."""
    names = dict.fromkeys((f.rule, f.temperature) for f in figures)

    def series(value: Any) -> tuple[Series, ...]:
        return tuple(
            Series(
                f"{rule}, t={temperature:g}",
                tuple(
                    (float(f.shape.split()[-1]), value(f))
                    for f in figures
                    if (f.rule, f.temperature) == (rule, temperature) and not f.shape.startswith("dynamic")
                ),
            )
            for rule, temperature in names
        )

    return [
        Chart(
            "tokens per forward: chain 4, tree 8, tree 16",
            "draft nodes",
            series(lambda f: f.tokens_per_forward),
        ),
        Chart("speed over plain", "draft nodes", series(lambda f: statistics.median(f.ratios))),
    ]


if __name__ == "__main__":
    main()
