"""The GPU check's own logic, on a CPU: what it would say of a right and of a wrong kernel."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention.triton import TritonPlan
from engine.model.kv_cache import as_bytes, narrowed
from engine.sampling.noise import gumbel_rows
from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.token_tree import TokenTree
from tests.gpu import check
from tests.gpu.successor import ScriptedAcceptance
from tests.heads import random_medusa
from tests.scripted import ScriptedSpeculator, fixed


def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert check.main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [finding["fault"] for finding in report["findings"]] == ["", ""]
    assert [(speed["batch"], speed["method"]) for speed in report["speeds"]] == [
        (batch, method) for batch in (1, 2) for method in ("none", "chain", "tree")
    ]
    for speed in report["speeds"]:
        assert speed["is_right"]
        assert speed["tokens_per_second"] > 0
        assert speed["tokens_per_step"] == 1 if speed["method"] == "none" else speed["tokens_per_step"] > 1
    assert "2 of 2 comparisons agree" in capsys.readouterr().out


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu.agreement import kernel_findings, logits_findings
    from tests.gpu.heads import head_findings

    assert not any(finding.fault for finding in head_findings(torch.device("cpu")))
    monkeypatch.setattr(TritonPlan, "_attend", lambda self, query, keys, values, out, options: out.zero_())
    device = torch.device("cpu")
    for findings in (
        kernel_findings(device, tiny=True),
        logits_findings(device, tiny=True),
        head_findings(device),
    ):
        assert all(finding.fault for finding in findings)


def test_wrong_medusa_heads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads whose states on the device are others."""
    from tests.gpu import heads

    [finding] = heads.medusa_findings(torch.device("cpu"))
    assert not finding.fault
    seeds = iter(range(2))
    monkeypatch.setattr(heads, "random_medusa", lambda: random_medusa(seed=next(seeds)))
    [finding] = heads.medusa_findings(torch.device("cpu"))
    assert "of the largest logit" in finding.fault


def test_wrong_sampling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.sampling import device_rows, ranking
    from tests.gpu.sampling import sampling_findings

    assert [finding.fault for finding in sampling_findings(torch.device("cpu"))] == [""]
    for module in (device_rows, ranking):
        with monkeypatch.context() as planted:
            planted.setattr(module, "gumbel_rows", lambda starts, size: gumbel_rows(starts + 1, size))
            [finding] = sampling_findings(torch.device("cpu"))
        assert "rows have other tokens" in finding.fault


def test_eight_bits_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here where they are allowed for once; a wrong kernel is told."""
    from engine.model import cache_type
    from tests.gpu.agreement import _rounding_finding
    from tests.gpu.eight_bits import eight_bit_findings

    device, eight_bits = torch.device("cpu"), torch.float8_e4m3fn
    monkeypatch.setattr(cache_type, "check_cache_type", lambda wanted, device: None)
    assert not _rounding_finding(eight_bits, device).fault
    findings = eight_bit_findings(device)
    assert len(findings) == 8
    assert not any(finding.fault for finding in findings)
    monkeypatch.setattr(TritonPlan, "_store", cut_off)
    assert "rounded otherwise" in _rounding_finding(eight_bits, device).fault
    assert "of the largest logit" in eight_bit_findings(device)[0].fault


def cut_off(
    plan: TritonPlan, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes numbers of three bits of mantissa that are rounded towards zero."""
    for new, kept in ((key, keys), (value, values)):
        mantissa, exponent = new.transpose(0, 1).frexp()
        cut = torch.ldexp((mantissa * 16).trunc() / 16, exponent)
        as_bytes(kept)[plan._inputs.slots] = as_bytes(narrowed(cut, kept.dtype))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_quantised_weights_agree_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits do, and are told where the layers are not the same; four bits need a GPU."""
    from tests.gpu import quantized

    monkeypatch.setattr(quantized, "_four_bits", lambda device: "not on a CPU")
    findings = quantized.quantized_findings(torch.device("cpu"))
    assert [finding.fault for finding in findings] == ["", "", "not on a CPU"]
    monkeypatch.setattr(
        quantized, "move_quantized", lambda module, device, scheme: module.model.norm.weight.uniform_()
    )
    assert "of the largest logit" in quantized.quantized_findings(torch.device("cpu"))[0].fault


@pytest.mark.parametrize("parents", [(0, 1, 2, 3), (0, 0, 1, 1, 2, 2)])
def test_acceptance_follows_the_script(parents: tuple[int, ...]) -> None:
    tree = TokenTree(tuple(range(len(parents))), parents)
    scripted = ScriptedAcceptance(ScriptedSpeculator(fixed(tree)), 0.8, vocab_size=1000)
    assert scripted.requirements == Requirements()
    request = DraftRequest("a", [5, 6], 2, 1, 0, [0], SamplingParams(), budget=8)
    firsts = seconds = 0
    for _ in range(2000):
        [drawn] = scripted.propose(ProposalContext((request,)))
        assert drawn.parents == parents
        right = [drawn.tokens[child - 1] == 7 for child in drawn.children(0)]
        assert sum(right) <= 1
        firsts += right[0]
        seconds += any(right[1:])
    assert firsts / 2000 == pytest.approx(0.8, abs=0.03)
    assert seconds / 2000 == pytest.approx(0.08 if len(tree.children(0)) > 1 else 0, abs=0.02)
