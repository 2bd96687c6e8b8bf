"""What the engine tells a speculator of each request."""

from dataclasses import replace

from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.engine.answers import run, target
from tests.engines import build_llm
from tests.scripted import ScriptedSpeculator

WISHES = SamplingParams(temperature=0.0, ignore_eos=True)


def test_it_is_told_how_many_requests_share_the_step() -> None:
    seen: list[tuple[str, int, int]] = []

    def note(request: DraftRequest) -> TokenTree:
        num_output = len(request.token_ids) - request.num_prompt_tokens
        seen.append((request.request_id, num_output, request.num_requests))
        return EMPTY_TREE

    llm = build_llm("ngram", target=target(), speculator=ScriptedSpeculator(note))
    lengths = {"a": 2, "b": 4, "c": 6}
    run(llm, {name: (tuple(b"one two"), replace(WISHES, max_tokens=most)) for name, most in lengths.items()})
    assert seen == [
        # One that has no room for a draft counts as well: its row is in the step.
        ("b", 1, 3),
        ("c", 1, 3),
        ("b", 2, 2),
        ("c", 2, 2),
        ("c", 3, 2),
        ("c", 4, 1),
    ]
