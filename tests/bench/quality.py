"""What a type of weights costs in quality, on real text: perplexity, KL divergence and greedy agreement.

    python -m tests.bench.quality [--model M] [--tokens 2048] [--dtypes float16,int8,int4] [--eight-bit-cache]

Every type of weights, over the key/value cache that is served with it, is compared with float32, on source
code (modules of Python's standard library) and on prose (this project's documents). Keys and values in
float8_e4m3fn, which GPUs have, are compared behind weights in float32, with attention in plain torch.
"""

import argparse
import heapq
import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import DType, ModelConfig
from engine.errors import StartupError
from engine.model.attention.choice import choose_backend
from engine.model.cache_type import choose_cache_type
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.model_runner import ModelRunner

BLOCK_SIZE = 16
CHUNK = 256
DTYPES: tuple[DType, ...] = ("float16", "int8", "int4")
EIGHT_BITS = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Quality:
    """How a model does on a text.

    Attributes:
        perplexity: Of the text.
        divergence: Mean KL divergence of its next-token distributions from the plain model's, in nats.
        agreement: Share of places where both like the same token best.
    """

    perplexity: float
    divergence: float
    agreement: float


def main() -> None:
    """Prints a table."""
    options = parse()
    plain = load(options.model, "float32")
    texts = {name: encode(plain, text, options.tokens) for name, text in read_texts().items()}
    expected = {name: log_probabilities(plain, tokens) for name, tokens in texts.items()}
    rounded = {}
    if options.eight_bit_cache:
        rounded = {name: log_probabilities(plain, tokens, EIGHT_BITS) for name, tokens in texts.items()}
    del plain
    head = ("weights", "text", "tokens", "perplexity", "vs float32", "KL", "same choice")
    say("{:12} {:6} {:>6} {:>11} {:>10} {:>9} {:>11}".format(*head))
    for name, tokens in texts.items():
        quality = compare(expected[name], expected[name], tokens)
        say(f"{'float32':12} {name:6} {len(tokens):6} {quality.perplexity:11.4f}")
    for name, got in rounded.items():
        say(row("cache of fp8", name, got, expected[name], texts[name]))
    for dtype in () if options.eight_bit_cache else options.dtypes:
        try:
            model = load(options.model, dtype)
        except StartupError as error:
            say(f"{dtype:12} {error}")
            continue
        for name, tokens in texts.items():
            say(row(dtype, name, log_probabilities(model, tokens), expected[name], tokens))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each text")
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), default=DTYPES, help="types of weights to compare"
    )
    parser.add_argument("--eight-bit-cache", action="store_true", help="that instead of types of weights")
    return parser.parse_args()


def load(model: str, dtype: DType) -> LoadedModel:
    """The model with weights of that type, on the CPU."""
    return load_causal_lm(ModelConfig(model=model, device="cpu", dtype=dtype, offline=True))


def read_texts() -> dict[str, str]:
    """Code and prose."""
    root = Path(__file__).parents[2]
    prose = "\n\n".join(
        (root / name).read_text("utf-8") for name in ("README.md", "docs/architecture.md", "CONTRIBUTING.md")
    )
    return {"code": inspect.getsource(heapq) + inspect.getsource(textwrap), "prose": prose}


def encode(model: LoadedModel, text: str, limit: int) -> list[int]:
    """The first tokens of a text."""
    assert model.tokenizer is not None
    return list(model.tokenizer.encode(text, add_special_tokens=False))[:limit]


def log_probabilities(
    model: LoadedModel, tokens: list[int], cache_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """float32 [num_tokens, vocab_size]: what comes after each token; None takes the cache that is served."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    dtype = cache_dtype or choose_cache_type("auto", model)
    cache = PagedKVCache(model.layers, num_blocks, BLOCK_SIZE, dtype, model.device)
    operators = None if dtype == EIGHT_BITS else model.operators
    runner = ModelRunner(model.module, cache, choose_backend(operators, model.device), model.vocab_size)
    rows = []
    for begin in range(0, len(tokens), CHUNK):
        piece = tokens[begin : begin + CHUNK]
        batch = runner.build([SequenceSlice(piece, begin, range(num_blocks), rows=len(piece))])
        rows.append(runner.forward(batch).log_softmax(-1))
    return torch.cat(rows)


def row(name: str, text: str, got: torch.Tensor, expected: torch.Tensor, tokens: list[int]) -> str:
    """A line about what is not the plain model."""
    quality, exact = compare(got, expected, tokens), compare(expected, expected, tokens)
    change = quality.perplexity / exact.perplexity - 1
    return (
        f"{name:12} {text:6} {len(tokens):6} {quality.perplexity:11.4f} {change:+10.3%} "
        f"{quality.divergence:9.6f} {quality.agreement:11.4f}"
    )


def compare(got: torch.Tensor, expected: torch.Tensor, tokens: list[int]) -> Quality:
    """Perplexity of `got`, and how far it is from `expected`."""
    following = torch.tensor(tokens[1:])
    surprise = -got[:-1].gather(1, following[:, None]).mean()
    divergence = (expected.exp() * (expected - got)).sum(-1).mean()
    agreement = (got.argmax(-1) == expected.argmax(-1)).float().mean()
    return Quality(float(surprise.exp()), float(divergence), float(agreement))


def say(line: str) -> None:
    """One line of the table."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
