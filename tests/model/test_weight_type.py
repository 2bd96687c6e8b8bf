import logging

import pytest
import torch
from torch import nn

from engine.config import DType
from engine.errors import StartupError
from engine.model.few_bits import FewBitsPacker
from engine.model.int8 import Int8Packer
from engine.model.linear import Float16Packer, packed_fp16_unavailable
from engine.model.loader import wrap_model
from engine.model.weight_type import (
    check_dtype,
    choose_device,
    plan_weights,
    takes_operators,
    unfit_weight,
    widen,
)
from tests.operators import need_operators
from tests.tiny import round_to_four_bits, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_packing = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM here")


@needs_packing
def test_on_a_cpu() -> None:
    operators = need_operators()
    integers: tuple[tuple[DType, str, type], ...] = (
        *(("auto", "int4", FewBitsPacker), ("int4", "int4", FewBitsPacker)),
        ("int8", "int8", Int8Packer),
    )
    for choice, called, kind in integers:
        plan = plan_weights(choice, CPU, operators)
        assert (plan.dtype, plan.activations) == (called, torch.float32)
        assert isinstance(plan.packer, kind)
        assert plan.strict == (choice != "auto")
    wishes: tuple[DType, ...] = ("auto", "float16")
    for wanted in wishes:
        plan = plan_weights(wanted, CPU, None)
        assert (plan.dtype, plan.activations) == ("float16", torch.float32)
        assert isinstance(plan.packer, Float16Packer)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        plan = plan_weights(name, CPU, operators)  # type: ignore[arg-type]
        assert (plan.dtype, plan.activations, plan.packer) == (name, dtype, None)


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, name in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_bf16=has_bf16, **_: has_bf16)
        plan = plan_weights("auto", CUDA, None)
        assert (plan.dtype, plan.activations, plan.packer) == (name, getattr(torch, name), None)
    for integers in ("int8", "int4"):
        with pytest.raises(
            StartupError, match=f"dtype is {integers}, but the device is cuda.*quantization {integers}"
        ):
            check_dtype(integers, CUDA)


def test_who_takes_operators() -> None:
    assert takes_operators("auto", CPU)
    assert takes_operators("float32", CPU)
    assert not takes_operators("bfloat16", CPU)
    assert not takes_operators("auto", CUDA)


def test_a_machine_without_fbgemm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with caplog.at_level(logging.INFO):
        assert plan_weights("auto", CPU, None).dtype == "float32"
    assert "held in float32: the CPU offers DEFAULT" in caplog.text
    with pytest.raises(StartupError, match="dtype is float16, but the CPU offers DEFAULT, and FBGEMM needs"):
        check_dtype("float16", CPU)
    with pytest.raises(StartupError, match="FBGEMM needs AVX2"):
        wrap_model(tiny_model("llama"), None, name="a", dtype="float16")


@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_integers_without_operators_are_refused(integers: DType) -> None:
    with pytest.raises(StartupError, match=rf"dtype is {integers}, but there are no C\+\+ operators here"):
        plan_weights(integers, CPU, None)


def test_a_model_without_weights_of_four_bits() -> None:
    """Said where it was wanted, and so called where it was not."""
    operators = need_operators()
    with pytest.raises(
        StartupError, match="dtype is int4, but no layer of a has weights of four to six bits"
    ):
        wrap_model(tiny_model("llama"), None, name="a", dtype="int4", operators=operators)
    assert (
        wrap_model(tiny_model("llama"), None, name="a", dtype="auto", operators=operators).weights == "int8"
    )
    module = round_to_four_bits(tiny_model("llama"))
    assert wrap_model(module, None, name="a", dtype="auto", operators=operators).weights == "int4"


def test_what_float16_cannot_hold_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    assert unfit_weight(module) is None
    module.get_parameter("1.weight")[0, 2] = 7e4
    assert unfit_weight(module.half()) == "1.weight"
    with pytest.raises(StartupError, match=r"dtype is float16, but 1\.weight has .* not finite in it; use"):
        widen(plan_weights("float16", CUDA, None), "1.weight")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    plan = widen(plan_weights("auto", CUDA, None), "1.weight")
    assert (plan.dtype, plan.activations) == ("float32", torch.float32)


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, kind in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto").type == kind


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps", "cuda:x", "cpu:3"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match=f"device is '{name}'"):
        choose_device(name)
