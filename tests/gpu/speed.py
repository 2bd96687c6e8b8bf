"""How fast the engine decodes beside what the device's memory allows."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.config import (
    CacheConfig,
    DraftModelSpeculation,
    EngineConfig,
    KVCacheDType,
    NoSpeculation,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.factory import assemble
from engine.model.loaded_model import LoadedModel
from engine.sampling_params import SamplingParams
from engine.speculation.factory import build_speculator
from tests.gpu.successor import ModelShape, ScriptedAcceptance, successor_model

EIGHT_B = ModelShape(32, 4096, 14336, 32, 8, 128256)
ONE_B = ModelShape(16, 2048, 8192, 32, 8, 128256)
TINY = ModelShape(2, 64, 96, 4, 2, 128)
BLOCK_SIZE = 16
# What is timed is a shape, not what a planner makes of it.
DRAFTING = {"draft_model": "draft", "probe": False, "planner": "fixed"}
METHODS: dict[str, SpeculationConfig] = {
    "none": NoSpeculation(),
    "chain": DraftModelSpeculation.model_validate(DRAFTING),
    "tree": DraftModelSpeculation.model_validate(DRAFTING | {"tree": "2,2,1,1"}),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is timed.

    Attributes:
        target, draft: Shapes of the models.
        dtype: Their type.
        context, answer: Tokens of each prompt and answer.
        batches: Requests that run together.
        acceptance: Chance that a draft token behind accepted ones is right.
        copy_bytes: What the bandwidth is measured with.
        kv_cache_dtype: The setting.
    """

    target: ModelShape = EIGHT_B
    draft: ModelShape = ONE_B
    dtype: torch.dtype = torch.bfloat16
    context: int = 256
    answer: int = 96
    batches: tuple[int, ...] = (1, 8, 32)
    acceptance: float = 0.8
    copy_bytes: int = 2 << 30
    kv_cache_dtype: KVCacheDType = "auto"


TINY_PLAN = Plan(TINY, TINY, torch.float32, context=6, answer=8, batches=(1, 2), copy_bytes=1 << 20)


@dataclass(frozen=True, slots=True)
class Speed:
    """One method at one batch size.

    Attributes:
        method, batch: Which.
        tokens_per_second: Of all requests together, prompts left out.
        tokens_per_step: The same by the target's steps and requests.
        share_of_limit: Tokens per second over what reading weights and context once a token allows.
        against_plain: Tokens per second over those without speculation.
        is_right: Whether every answer was the one that the models' making foretells.
    """

    method: str
    batch: int
    tokens_per_second: float
    tokens_per_step: float
    share_of_limit: float
    against_plain: float
    is_right: bool


@dataclass(slots=True)
class _Run:
    """Tokens, steps and seconds from all prompts read until the first answer ends."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


def copy_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes per second, read and written both counted: the best of some copies."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        began = _now(device)
        target.copy_(source)
        best = min(best, _now(device) - began)
    return 2 * num_bytes / best


def speeds(plan: Plan, bandwidth: float, device: torch.device) -> Iterator[Speed]:
    """Every method at every batch size."""
    longest = plan.context + plan.answer + 64
    target = successor_model("target", plan.target, longest, plan.dtype, device)
    draft = successor_model("draft", plan.draft, longest, plan.dtype, device)
    for batch in plan.batches:
        limit = batch * bandwidth / _bytes_per_step(target, batch, plan.context + plan.answer // 2)
        plain = 0.0
        for method in METHODS:
            core = _core(method, plan, target, draft)
            _decode(core, plan, batch, min(8, plan.answer), device)  # Kernels are compiled on the way.
            run = _decode(core, plan, batch, plan.answer, device)
            rate = run.tokens / run.seconds
            plain = plain or rate
            yield Speed(
                method,
                batch,
                rate,
                run.tokens / run.steps / batch,
                rate / limit,
                rate / plain,
                is_right=all(
                    answer == _foretold(plan, index, len(answer))
                    for index, answer in enumerate(run.answers.values())
                ),
            )


def _core(method: str, plan: Plan, target: LoadedModel, draft: LoadedModel) -> EngineCore:
    blocks = max(plan.batches) * (-(-(plan.context + plan.answer + 64) // BLOCK_SIZE) + 1)
    config = EngineConfig(
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=blocks,
            kv_cache_dtype=plan.kv_cache_dtype,
            prefix_caching=False,
        ),
        scheduler=SchedulerConfig(max_num_seqs=max(plan.batches), max_num_batched_tokens=16384),
        speculation=METHODS[method],
    )
    drafts = [] if method == "none" else [draft]
    inner = build_speculator(config, target, drafts, blocks)
    if inner is None:
        return assemble(config, target).core
    scripted = ScriptedAcceptance(inner, plan.acceptance, plan.target.vocab_size)
    return assemble(config, target, drafts, scripted).core


def _decode(core: EngineCore, plan: Plan, batch: int, length: int, device: torch.device) -> _Run:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    run = _Run({str(index): [] for index in range(batch)})
    for index, name in enumerate(run.answers):
        core.add_request(name, _prompt(plan, index), params)
    while not all(run.answers.values()):
        _step(core, run)
    run.tokens = run.steps = 0
    began = _now(device)
    while core.has_work and not _step(core, run):
        pass
    run.seconds = _now(device) - began
    for name in run.answers:
        core.abort(name)
    core.take_stats()
    return run


def _step(core: EngineCore, run: _Run) -> bool:
    """Makes a step; whether an answer has ended."""
    outputs = core.step()
    run.steps += 1
    for output in outputs:
        run.answers[output.request_id].extend(output.token_ids)
        run.tokens += len(output.token_ids)
    return any(output.finish_reason is not None for output in outputs)


def _prompt(plan: Plan, index: int) -> list[int]:
    return [(97 * index + place) % plan.target.vocab_size for place in range(plan.context)]


def _foretold(plan: Plan, index: int, length: int) -> list[int]:
    """How the prompt of that index goes on."""
    begin = _prompt(plan, index)[-1] + 1
    return [token % plan.target.vocab_size for token in range(begin, begin + length)]


def _bytes_per_step(model: LoadedModel, batch: int, context: int) -> float:
    """What a plain step reads: all weights but the embedding, and every request's keys and values."""
    module = model.module
    weights: int = sum(weight.nbytes for weight in module.parameters())
    weights -= module.get_input_embeddings().weight.nbytes
    numbers = sum(layer.numbers_per_token for layer in model.layers)
    return weights + batch * context * numbers * model.dtype.itemsize


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
