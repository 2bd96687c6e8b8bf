"""Many greedy tokens with speculation and without, over varied prompts: is there a single difference?

    python -m tests.bench.greedy_tokens --prompts FILE ... [--tokens 20000] [--streams 8] [--state FILE]

Two engines over the same weights answer the same prompts, `--streams` at a time: one decodes plainly, one
speculates. Answers go past the model's own end, so that each has --max-tokens tokens. Where two answers
part, the gap between the two best logits there is shown. With --state every group of prompts is noted in a
file as it is done, and a run that was ended goes on from there.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
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
)
from engine.factory import assemble
from engine.llm import LLM
from engine.model.loader import load_causal_lm
from engine.sampling_params import SamplingParams
from engine.speculation.factory import load_drafts
from server.bench.prompts import own_prompts, read_prompts
from tests.bench.methods import BenchPrompt, encode, explain


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that were answered together.

    Attributes:
        prompts: How many.
        tokens: Tokens that were compared.
        plain_seconds, speculative_seconds: What the answers took.
        drafted, accepted: What speculation did.
        differing: Where answers part.
    """

    prompts: int
    tokens: int
    plain_seconds: float
    speculative_seconds: float
    drafted: int
    accepted: int
    differing: tuple[str, ...]


def main() -> int:
    """Runs the comparison; 1 if there is a difference."""
    options = parse()
    done = read_state(options.state)
    plain, speculative = build(options)
    prompts = read_mixed(options.prompts, plain)
    wishes = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    begin = sum(group.prompts for group in done)
    report(done)
    while sum(group.tokens for group in done) < options.tokens:
        if begin >= len(prompts):
            sys.stderr.write(
                f"all {len(prompts)} prompts are used up: name more files, or raise --max-tokens\n"
            )
            return 1
        chosen = prompts[begin : begin + options.streams]
        begin += len(chosen)
        done.append(compare(plain, speculative, chosen, wishes))
        if options.state is not None:
            with options.state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(done[-1])) + "\n")
        report(done)
    return int(any(group.differing for group in done))


def parse() -> argparse.Namespace:
    """The command line."""
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.bench.greedy_tokens", description=description)
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model", help="drafts; default: prompt lookup")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="default: four of our own")
    parser.add_argument("--tokens", type=int, default=20_000, help="at least so many are compared")
    parser.add_argument("--max-tokens", type=int, default=128, help="per answer")
    parser.add_argument("--streams", type=int, default=8, help="prompts answered together")
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--state", type=Path, help="file to go on from")
    return parser.parse_args()


def build(options: argparse.Namespace) -> tuple[LLM, LLM]:
    """Plain and speculating, over the same weights. Nothing is shared between prompts: no prefix cache."""
    model = ModelConfig(model=options.model, dtype=options.dtype, max_model_len=options.max_model_len)
    target = load_causal_lm(model)
    # A planner would draft nothing where that does not pay, and then there is nothing to compare.
    drafting: dict[str, Any] = {"num_draft_tokens": options.num_draft_tokens, "planner": "fixed"}
    speculation: SpeculationConfig = NgramSpeculation(**drafting)
    if options.draft_model:
        speculation = DraftModelSpeculation(draft_model=options.draft_model, **drafting)
    num_blocks = options.streams * -(-options.max_model_len // CacheConfig().block_size)
    engines = []
    for method in (NoSpeculation(), speculation):
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_caching=False, num_kv_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=options.streams),
            speculation=method,
        )
        engines.append(LLM(assemble(config, target, load_drafts(method, target, model))))
    return engines[0], engines[1]


def read_mixed(files: list[Path], llm: LLM) -> list[BenchPrompt]:
    """The prompts of all files, one of each in turn; those that leave no room for an answer are left out."""
    columns = [[(path.stem, prompt) for prompt in read_prompts(path)] for path in files]
    rows = chain.from_iterable(zip_longest(*columns or [[("own", prompt) for prompt in own_prompts()]]))
    prompts = [
        BenchPrompt(f"{row[0]}/{row[1].name}", encode(row[1], llm.tokenizer))
        for row in rows
        if row is not None
    ]
    return [prompt for prompt in prompts if len(prompt.token_ids) <= llm.model.max_model_len // 2]


def read_state(path: Path | None) -> list[Group]:
    """The groups that an earlier run noted."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Group(**{**row, "differing": tuple(row["differing"])}) for row in rows]


def compare(plain: LLM, speculative: LLM, prompts: list[BenchPrompt], wishes: SamplingParams) -> Group:
    """Answers prompts in both ways."""
    ids = [prompt.token_ids for prompt in prompts]
    began = time.perf_counter()
    expected = plain.generate(ids, wishes)
    middle = time.perf_counter()
    answers = speculative.generate(ids, wishes)
    ended = time.perf_counter()
    differing = tuple(
        f"{prompt.name}: {explain(plain, prompt, wanted, got)}"
        for prompt, wanted, got in zip(prompts, expected, answers, strict=True)
        if wanted.token_ids != got.token_ids
    )
    return Group(
        prompts=len(prompts),
        tokens=sum(len(answer.token_ids) for answer in answers),
        plain_seconds=middle - began,
        speculative_seconds=ended - middle,
        drafted=sum(answer.speculation.num_draft_tokens for answer in answers),
        accepted=sum(answer.speculation.num_accepted_tokens for answer in answers),
        differing=differing,
    )


def report(done: list[Group]) -> None:
    """One line for all so far, and the differences of the last group."""
    if not done:
        return
    tokens = sum(group.tokens for group in done)
    drafted = sum(group.drafted for group in done)
    accepted = sum(group.accepted for group in done)
    plain, speculative = (
        tokens / sum(seconds)
        for seconds in ([g.plain_seconds for g in done], [g.speculative_seconds for g in done])
    )
    sys.stdout.write(
        f"{sum(group.prompts for group in done)} prompts, {tokens} tokens, "
        f"{sum(len(group.differing) for group in done)} answers differ; {accepted} of {drafted} draft tokens "
        f"accepted; {plain:.1f} tokens/s plain, {speculative:.1f} speculating\n"
    )
    sys.stdout.writelines(f"  {place}\n" for place in done[-1].differing)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
