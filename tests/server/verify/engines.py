"""Engines around tiny models as subjects, and plans of a few seconds."""

from pathlib import Path
from typing import Any

from engine.config import CacheConfig, DraftModelSpeculation, EngineConfig, NgramSpeculation, SchedulerConfig
from engine.factory import Engine, assemble
from server.cli import build_parser
from server.verify.in_process import EngineSubject
from server.verify.plan import Plan, read_plan
from tests.engines import load_tiny

PROMPTS = Path(__file__).parent / "prompts.jsonl"
SMALL = ("--quick", "--quiet", "--max-tokens", "8", "--prompts", str(PROMPTS), "--seeds", "120")


def tiny_engine(method: str = "draft_model", **room: Any) -> Engine:
    """A target, and a draft that is often but not always of its opinion."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_kv_blocks=600),
        scheduler=SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=512, **room),
        speculation=DraftModelSpeculation(draft_model="tiny", planner="fixed")
        if method == "draft_model"
        else NgramSpeculation(ngram_min=1, planner="fixed"),
    )
    drafts = [load_tiny(noise=0.05, max_model_len=256)] if method == "draft_model" else []
    return assemble(config, load_tiny(max_model_len=256), drafts)


def tiny_subject(method: str = "draft_model") -> EngineSubject:
    return EngineSubject(tiny_engine(method), 40, "float32")


def plan(*flags: str) -> Plan:
    return read_plan(build_parser().parse_args(["verify", *SMALL, *flags]))
