"""Whether quantised weights say on a GPU what they should, recorded passes included."""

import importlib.util

import torch
from torch import nn

from engine.config import Quantization
from engine.errors import StartupError
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.triton import TritonAttention
from engine.model.quantizing import check_quantization, move_quantized, quantize
from tests.gpu.agreement import LOGITS_TOLERANCE, SPLIT, CountingRecorder, Finding, last_logits
from tests.tiny import tiny_model

FOUR_BITS_TOLERANCE = 0.2
"""Relative to the largest result: steps of a fifteenth of what 32 weights span."""


def quantized_findings(device: torch.device) -> list[Finding]:
    """What torchao makes of a tiny model in eight bits, and of a layer in four.

    Schemes that the device or the installation does not have are found wanting, with the reason.
    """
    schemes: tuple[Quantization, ...] = ("int8", "fp8", "int4")
    return [_finding(scheme, device) for scheme in schemes]


def _finding(scheme: Quantization, device: torch.device) -> Finding:
    name = f"weights in {scheme}"
    if importlib.util.find_spec("torchao") is None:
        return Finding(f"{name}: left out, torchao is not installed", "")
    if device.type != "cpu":
        try:
            check_quantization(scheme, "auto", device)
        except StartupError as error:
            return Finding(f"{name}: left out, {error}", "")
    return Finding(name, _four_bits(device) if scheme == "int4" else _eight_bits(scheme, device))


def _eight_bits(scheme: Quantization, device: torch.device) -> str:
    """How logits differ from the same weights' on a CPU, the last of three replays."""
    here, there = tiny_model(), tiny_model()
    move_quantized(here, torch.device("cpu"), scheme)
    move_quantized(there, device, scheme)
    expected = last_logits(here, ReferenceAttention())
    recorder = CountingRecorder(device) if device.type == "cuda" else None
    got = last_logits(there, TritonAttention(SPLIT, recorder), repeats=3)
    error = float((got - expected).abs().max() / expected.abs().max())
    if not error <= LOGITS_TOLERANCE:
        return f"{error:.2g} of the largest logit"
    if recorder is not None and recorder.num_replays != 6:
        return f"{recorder.num_replays} replays instead of 6; the log says why"
    return ""


def _four_bits(device: torch.device) -> str:
    """How a layer's results differ from those in sixteen bits."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 256, dtype=torch.bfloat16, device=device).requires_grad_(False)
    x = torch.randn(5, 512, dtype=torch.bfloat16, device=device)
    expected = linear(x).float()
    if not quantize(linear, "int4"):
        return "a layer of whole groups was left as it is"
    error = float((linear(x).float() - expected).abs().max() / expected.abs().max())
    return "" if error <= FOUR_BITS_TOLERANCE else f"{error:.2g} of the largest result"
