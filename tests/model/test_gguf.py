import logging
import math
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import ModelConfig
from engine.errors import ModelNotSupported, StartupError
from engine.model.gguf import convert_gguf
from engine.model.loader import load_causal_lm
from tests.model.gguf_files import EOS_ID, NUM_PADDED, NUM_TOKENS, source_model, write_gguf
from tests.operators import share_operators
from tests.tiny import byte_tokenizer

THETA = 1e6
TOKENS = torch.arange(40, 60)[None]


def convert(tmp_path: Path, **options: object) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "model.gguf", **options), folder)  # type: ignore[arg-type]
    return folder


def tokenizer_of(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_an_unquantised_file_gives_the_same_model(arch: str, tmp_path: Path) -> None:
    folder = convert(tmp_path, arch=arch)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    source = source_model(arch)
    assert module.config.model_type == arch
    assert {name: tensor.tolist() for name, tensor in module.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in source.state_dict().items()
    }
    source.set_attn_implementation("eager")
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.allclose(module(TOKENS).logits, source(TOKENS).logits, atol=1e-4)


def test_a_quantised_file_is_stored_as_float16(tmp_path: Path) -> None:
    folder = convert(tmp_path, quantisation=GGMLQuantizationType.Q8_0)
    stored = load_file(folder / "model.safetensors")
    matrices = {name: tensor for name, tensor in stored.items() if tensor.ndim > 1}
    assert {tensor.dtype for tensor in matrices.values()} == {torch.float16}
    # Ones are exact in the shortest type.
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    for name, tensor in source_model("llama").state_dict().items():
        # Half a step of Q8_0, its scale's rounding to float16 and the stored number's.
        bound = tensor.abs().max() * (1 / 254 + 1 / 2048 + 1 / 2048)
        assert (stored[name].float() - tensor).abs().max() <= bound


def test_the_tokenizer_comes_back(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(convert(tmp_path))
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.eos_token_id == EOS_ID
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    assert tokenizer.encode("<|im_end|>") == [EOS_ID + 1]
    assert tokenizer.encode("ab") == [256]
    for text in ("ab cd\n\n  ef", "naïve 日本 12", "<bos>x<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_text_is_split_as_the_file_says(pre: str, tokens: list[str], tmp_path: Path) -> None:
    assert tokenizer_of(convert(tmp_path, pre=pre)).tokenize("12") == tokens


def test_an_unknown_splitting_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        convert(tmp_path, pre="never-heard-of")
    assert "never-heard-of" in caplog.text


def test_padding_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    folder = convert(tmp_path)
    assert len(tokenizer_of(folder)) == NUM_TOKENS
    assert AutoConfig.from_pretrained(folder).vocab_size == NUM_PADDED


def test_a_gguf_file_is_loaded_like_any_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    share_operators(tmp_path / "cache")
    model = load_causal_lm(
        ModelConfig(model=str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache", offline=True)
    )
    assert model.vocab_size == NUM_TOKENS
    assert model.eos_token_ids == {EOS_ID, EOS_ID + 1}
    assert model.max_model_len == 512
    assert len(model.layers) == 2


def llama3_divisors(factor: float, low: float = 1.0) -> list[float]:
    """As llama.cpp's converter computes them for heads of 8 and 8192 positions."""
    divisors = []
    for index in range(4):
        wavelength = 2 * math.pi * THETA ** (index / 4)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (4 - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def test_the_rotary_scaling_of_llama_3_is_found_again(tmp_path: Path) -> None:
    divisors = llama3_divisors(8.0)
    assert divisors[0] == 1 < divisors[2] < divisors[3] == 8
    folder = convert(tmp_path, rope_divisors=divisors, theta=THETA)
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_type"] == "llama3"
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = THETA ** -(torch.arange(4) / 4)
    assert torch.allclose(frequencies, plain / torch.tensor(divisors), rtol=1e-4)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="not Llama 3's"):
        convert(tmp_path, rope_divisors=llama3_divisors(8.0, low=2.0), theta=THETA)


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    folder = convert(tmp_path, rope_divisors=[1.0] * 4)
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rotary_scaling_that_would_be_lost_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"scales its rotary positions \({kind}\)"):
        convert(tmp_path, rope_scaling=kind)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(tmp_path, leave_out="blk.1.ffn_up.weight")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model" * 100)
    with pytest.raises(StartupError, match="cannot be read as a GGUF model"):
        convert_gguf(file, tmp_path)


def test_an_architecture_that_cannot_be_paged_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "bloom")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_head_count):
        add(1)
    writer.add_layer_norm_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelNotSupported, match="Bloom"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)
