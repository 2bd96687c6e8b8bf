"""Trees where room is short: at the end of the answer, of the context, of the pool and of the step."""

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import ProposalContext, Requirements, Speculator
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT, essence, plain_answer, run, target
from tests.engines import TREES, build_llm, drafter_of, load_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=8, frequency_penalty=0.5)
BOTH = pytest.mark.parametrize("wishes", [GREEDY, SEEDED], ids=["greedy", "seeded"])
WIDE = "draft_model 4,2,1,1"  # 4 + 8 + 8 + 8 nodes.


class Watching:
    """Keeps the trees that another speculator proposes."""

    def __init__(self, inner: Speculator) -> None:
        self.inner = inner
        self.seen: list[tuple[int, int, TokenTree]] = []

    @property
    def requirements(self) -> Requirements:
        return self.inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        trees = self.inner.propose(context)
        self.seen += [
            (len(request.token_ids), request.max_depth, tree)
            for request, tree in zip(context.requests, trees, strict=True)
        ]
        return trees

    def num_computed_tokens(self, request_id: str) -> int:
        return self.inner.num_computed_tokens(request_id)

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)


@BOTH
@pytest.mark.parametrize("max_model_len", [48, 128])
def test_near_the_end_a_tree_loses_levels_and_keeps_its_siblings(
    wishes: SamplingParams, max_model_len: int
) -> None:
    """The end is that of max_tokens, or that of the context."""
    model = target(max_model_len)
    wishes = replace(wishes, max_tokens=min(40, max_model_len - len(PROMPT)))
    llm = build_llm(WIDE, target=model, draft=load_tiny(noise=0.1, max_model_len=128))
    assert llm.core._drafting is not None
    drafter = llm.core._drafting._drafters[-1]
    watching = drafter.speculator = Watching(drafter.speculator)
    levels = [0, 4, 12, 20, 28]
    depths: set[int] = set()
    for shorter in range(4):
        own = replace(wishes, max_tokens=(wishes.max_tokens or 0) - shorter)
        answer = run(llm, {"a": (PROMPT, own)})["a"]
        assert essence(answer) == essence(plain_answer(own, max_model_len=max_model_len))
        for num_tokens, max_depth, tree in watching.seen:
            assert max_depth == len(PROMPT) + (own.max_tokens or 0) - num_tokens - 1
            assert len(tree) == levels[min(max_depth, 4)]
            depths.add(max_depth)
        watching.seen.clear()
    assert depths & {1, 2, 3}


@BOTH
def test_a_lookup_keeps_its_siblings_at_two_tokens_room(wishes: SamplingParams) -> None:
    """The first token makes a beginning whole that went on in two ways; the draft has room for one level."""
    wishes = replace(wishes, max_tokens=3, logit_bias=((ord("z"), 100.0),))
    prompt = tuple(b"1wxyzA2wxyzB3wxyzA4wxyzB5wxy")
    llm = build_llm("suffix", target=target(), num_draft_tokens=8)
    drafter = drafter_of(llm)
    watching = drafter.speculator = Watching(drafter.speculator)
    answer = run(llm, {"a": (prompt, wishes)})["a"]
    assert essence(answer) == essence(plain_answer(wishes, prompt))
    [(_, max_depth, tree)] = watching.seen
    assert max_depth == 1
    assert set(tree.tokens) == set(b"AB")
    assert tree.parents == (0, 0)


@BOTH
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_short_answers(tree: str, max_tokens: int, wishes: SamplingParams) -> None:
    wishes = replace(wishes, max_tokens=max_tokens)
    answer = run(build_llm(tree, target=target()), {"a": (PROMPT, wishes)})["a"]
    assert essence(answer) == essence(plain_answer(wishes))
    assert answer.speculation.num_committed_tokens == max_tokens


@pytest.mark.parametrize("arch", ["gpt2", "mistral"])
def test_a_draft_of_a_shorter_context(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2's draft has a row per position: a tree that reached past the last one would fail."""
    model = load_tiny(arch)
    shorter: dict[str, Any] = {"n_positions": 40} if arch == "gpt2" else {}
    draft = load_tiny(arch, noise=0.05, max_model_len=40, **shorter)
    plain = build_llm("none", target=model).generate([PROMPT], GREEDY)[0]
    llm = build_llm(WIDE, target=model, draft=draft)
    answer = run(llm, {"a": (PROMPT, GREEDY)})["a"]
    assert essence(answer) == essence(plain)
    assert answer.speculation.num_draft_tokens > 100
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@BOTH
@pytest.mark.parametrize("tree", TREES)
def test_a_dry_pool_costs_nodes(tree: str, wishes: SamplingParams) -> None:
    prompts = {name: tuple(name.encode() * 3) for name in ("abc ", "one two ", "x = 1\n", "zz")}
    llm = build_llm(tree, target=target(), num_kv_blocks=50)
    answers = run(llm, {name: (prompt, wishes) for name, prompt in prompts.items()})
    for name, answer in answers.items():
        assert essence(answer) == essence(plain_answer(wishes, prompts[name])), name


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
@pytest.mark.parametrize("method", ["draft_model dynamic", "draft_models 2,1,1"])
def test_ratio_rules_are_refused_where_they_do_not_hold(method: str, acceptance: Acceptance) -> None:
    wishes = replace(SEEDED, speculation=SpeculationParams(acceptance=acceptance))
    with pytest.raises(InvalidRequest, match=f"speculation.acceptance: .*{acceptance}"):
        build_llm(method).core.add_request("a", PROMPT, wishes)


@BOTH
@pytest.mark.parametrize("tree", TREES)
def test_the_prefix_cache_holds_what_a_plain_run_would_have_left(tree: str, wishes: SamplingParams) -> None:
    """Every block that can be found holds its tokens and no other, for the target and for the draft."""
    llm = build_llm(tree, target=target(), draft=load_tiny(noise=0.05))
    [first] = llm.generate([PROMPT], wishes)
    longer = (*PROMPT, *first.token_ids)
    for length in (30, 45, len(longer)):
        again = run(llm, {"b": (longer[:length], wishes)})["b"]
        assert again.num_cached_tokens >= length - 8
        assert essence(again) == essence(plain_answer(wishes, longer[:length]))
        assert again.speculation.num_accepted_tokens > 0
