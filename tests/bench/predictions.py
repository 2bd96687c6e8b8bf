"""What Predicted Outputs bring when a file is edited: tokens per forward and speed, with and without.

    python -m tests.bench.predictions --model M [--max-tokens 1200] [--temperature 0]

A file of code is to be said again with one variable renamed. The file itself is the prediction. Each way of
decoding answers in turn; texts are compared with the plain run's. A model that does not copy faithfully says
so in the column of tokens found.
"""

import argparse
import sys
import time
from dataclasses import replace

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.factory import assemble
from engine.llm import LLM, Completion
from engine.model.loader import load_causal_lm
from engine.sampling_params import SamplingParams, SpeculationParams

METHODS: tuple[SpeculationConfig, ...] = (NoSpeculation(), NgramSpeculation())
OLD, NEW = "total", "running_total"


def source(num_functions: int) -> str:
    """A file of code whose functions all use one name."""
    return "".join(
        f"def add_{n}(items, scale={n}):\n"
        f'    """Adds up what is longer than {n}."""\n'
        f"    {OLD} = 0\n"
        f"    for item in items:\n"
        f"        if len(item) > {n}:\n"
        f"            {OLD} += scale * item.size\n"
        f"    return {OLD}\n\n\n"
        for n in range(num_functions)
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.predictions")
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--functions", type=int, default=8, help="of nine lines each")
    parser.add_argument("--max-tokens", type=int, default=1200)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    model = ModelConfig(model=options.model, max_model_len=options.max_model_len)
    target = load_causal_lm(model)
    code = source(options.functions)
    asked = f"Rename the variable {OLD} to {NEW} in this file. Say the whole file and nothing else.\n\n{code}"
    wishes = SamplingParams(temperature=options.temperature, seed=0, max_tokens=options.max_tokens)
    plain: list[int] | None = None
    say("method", "prediction", "tokens/s", "tokens/forward", "accepted/drafted", "found", "same text")
    for speculation in METHODS:
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=1),
            speculation=speculation,
        )
        llm = LLM(assemble(config, target))
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": asked}])
        predicted = tuple(llm.tokenizer.encode_continuation(code, prompt))
        for prediction in ((), predicted):
            params = replace(wishes, speculation=SpeculationParams(prediction=prediction))
            answer, speed = run(llm, prompt, params)
            plain = plain or answer.token_ids
            report(answer, speed, config, same=answer.token_ids == plain)


def run(llm: LLM, prompt: list[int], wishes: SamplingParams) -> tuple[Completion, float]:
    """One answer, and its tokens per second, the reading of the prompt included."""
    began = time.perf_counter()
    [answer] = llm.generate([prompt], wishes)
    return answer, len(answer.token_ids) / (time.perf_counter() - began)


def report(answer: Completion, speed: float, config: EngineConfig, *, same: bool) -> None:
    """One line of the table."""
    stats = answer.speculation
    say(
        config.speculation.method,
        "yes" if stats.num_predicted_tokens else "no",
        f"{speed:.1f}",
        f"{stats.num_committed_tokens / stats.num_steps:.2f}",
        f"{stats.num_accepted_tokens}/{stats.num_draft_tokens}",
        f"{stats.num_found_tokens}/{stats.num_predicted_tokens}",
        "yes" if same else "no",
    )


def say(*cells: str) -> None:
    """A row, at once."""
    sys.stdout.write("".join(f"{cell:>18}" for cell in cells) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
