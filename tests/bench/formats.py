"""Is every answer of a prescribed format valid, and the same, under every method of speculation?

    python -m tests.bench.formats [--count 500] [--tools 100] [--methods ngram "draft_model 2,2"] [--first 0]

Random schemas, each with options and a seed of its own, and random functions that have to be called, go to a
tiny model: plainly, and then under each method. An answer that does not fit, that failed, or that is not what
the model says without speculation is told with its number. The suite does the same with a few of each
(tests/engine/test_random_formats.py).
"""

import argparse
import sys
import time

import torch

from tests.engines import HEADS, METHODS, TREES
from tests.formats import Case, answers, engine, faults, schema_case, tool_case, whole

_EVERY_METHOD = (*METHODS, *TREES, *HEADS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.formats", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="schemas")
    parser.add_argument("--tools", type=int, default=100, help="sets of functions")
    parser.add_argument("--first", type=int, default=0, help="number of the first of each")
    parser.add_argument("--methods", nargs="+", default=_EVERY_METHOD)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[Case] = [schema_case(options.first + number) for number in range(options.count)]
    cases += [tool_case(options.first + number) for number in range(options.tools)]
    plain = answers(engine(), cases)
    say(f"{len(cases)} formats, {whole(plain)} answers that ended by themselves")
    num_faults = 0
    for method in ("none", *options.methods):
        began = time.perf_counter()
        found = plain if method == "none" else answers(engine(method), cases)
        wrong = faults(cases, found, plain)
        accepted = sum(answer.speculation.num_accepted_tokens for answer in found)
        share = accepted / sum(len(answer.token_ids) for answer in found)
        seconds = time.perf_counter() - began
        say(f"{method}: {len(wrong)} faults, {share:.0%} accepted draft tokens, {seconds:.0f} s")
        for fault in wrong[:10]:
            say(f"  {fault}")
        num_faults += len(wrong)
    sys.exit(min(num_faults, 1))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
