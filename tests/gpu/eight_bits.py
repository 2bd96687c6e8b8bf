"""Whether engines over keys and values in eight bits say on a GPU what they say on a CPU."""

from dataclasses import replace

import torch

from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.triton import TritonAttention
from engine.model.cache_type import EIGHT_BITS_CAPABILITY
from tests.gpu.agreement import LOGITS_TOLERANCE, SPLIT, Finding, last_logits
from tests.gpu.speed import TINY_PLAN, speeds
from tests.tiny import tiny_model

ARCHS = ("llama", "gpt_oss")


def eight_bit_findings(device: torch.device) -> list[Finding]:
    """Logits of small models, then answers of engines with the setting; none where a GPU has no such type."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < EIGHT_BITS_CAPABILITY:
        return []
    return [*(_logits_finding(arch, device) for arch in ARCHS), *_answer_findings(device)]


def _logits_finding(arch: str, device: torch.device) -> Finding:
    expected = _logits(arch, torch.device("cpu"), ReferenceAttention())
    got = _logits(arch, device, TritonAttention(SPLIT))
    error = float((got - expected).abs().max() / expected.abs().max())
    fault = "" if error <= LOGITS_TOLERANCE else f"{error:.2g} of the largest logit"
    return Finding(f"logits of {arch} over a cache of eight bits", fault)


def _logits(arch: str, device: torch.device, backend: AttentionBackend) -> torch.Tensor:
    return last_logits(tiny_model(arch).to(device), backend, cache_dtype=torch.float8_e4m3fn)


def _answer_findings(device: torch.device) -> list[Finding]:
    """Plain, with chains and with trees, drafts' caches and graphs included."""
    return [
        Finding(
            f"{speed.batch} answers over a cache of eight bits, {speed.method}",
            "" if speed.is_right else "not what the models' making foretells",
        )
        for speed in speeds(replace(TINY_PLAN, kv_cache_dtype="fp8"), 1.0, device)
    ]
