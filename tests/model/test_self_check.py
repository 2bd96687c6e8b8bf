import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelNotSupported
from engine.model.attention.interface import ATTENTION_NAME, probe_layers
from engine.model.attention.reference import ReferenceAttention
from engine.model.loader import wrap_model
from engine.model.self_check import (
    check_logits,
    check_paged_logits,
    paged_logits_in_one_pass,
    run_trial,
)
from tests.tiny import ARCHITECTURES, tiny_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_we_serve_passes_and_keeps_our_attention(arch: str) -> None:
    module = tiny_model(arch)
    trial = run_trial(module)
    assert trial is not None
    check_paged_logits(module, probe_layers(module), ReferenceAttention(), trial)
    assert module.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("kind", ["bert", "doge"])
def test_a_model_that_attends_in_another_way_is_refused(kind: str) -> None:
    # An encoder that looks ahead, and a model that adds learned scores to its mask (zeros until trained).
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL), dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if name.endswith("self_attn.A"):
            parameter.data.fill_(2.0)
    with pytest.raises(ModelNotSupported, match="other logits on a paged cache"):
        wrap_model(module, None, name=kind)


def test_a_model_that_does_not_pass_arguments_on_is_refused() -> None:
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron", **SMALL), dtype=torch.float32)
    with pytest.raises(ModelNotSupported, match="does not hand its caller's arguments on"):
        wrap_model(module, None, name="nemotron")


def test_a_layer_replaced_by_an_unequal_one_is_refused() -> None:
    module = tiny_model("llama")
    layers, trial = probe_layers(module), run_trial(module)
    assert trial is not None
    module.model.layers[1].input_layernorm.weight.data *= 1.1
    with pytest.raises(ModelNotSupported, match="other logits on a paged cache"):
        check_paged_logits(module, layers, ReferenceAttention(), trial)


def test_sixteen_bits_are_let_pass() -> None:
    assert run_trial(tiny_model("llama").to(torch.bfloat16)) is None


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_in_one_pass_what_we_serve_passes_too(arch: str) -> None:
    module = tiny_model(arch)
    trial = run_trial(module)
    assert trial is not None
    layers = probe_layers(module)
    ours = paged_logits_in_one_pass(module, layers, ReferenceAttention(), trial.tokens)
    check_logits(module, ours, trial)


def test_a_layer_that_mixes_neighbouring_rows_is_refused_in_one_pass() -> None:
    module = tiny_model("llama")
    # Each row takes something from the one before it, as a short convolution does.
    module.model.layers[1].mlp.register_forward_hook(
        lambda _layer, _args, x: x + pad(x[:, :-1], (0, 0, 1, 0))
    )
    layers, trial = probe_layers(module), run_trial(module)
    assert trial is not None
    ours = paged_logits_in_one_pass(module, layers, ReferenceAttention(), trial.tokens)
    with pytest.raises(ModelNotSupported, match="other logits on a paged cache"):
        check_logits(module, ours, trial)
