"""What is written is read again as it was, by the names and rules of the formats."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.speculation.heads.config import EagleConfig, MedusaConfig
from engine.speculation.heads.eagle import build_eagle_head
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.heads.medusa_reading import read_medusa_heads
from engine.speculation.heads.writing import save_eagle_head, save_medusa_heads
from tests.speculation.heads.checkpoints import DRAFT_IDS, LLAMA3_ROPE
from tests.speculation.heads.eagle_cases import CASES
from tests.speculation.heads.running import TARGET

EAGLE3 = EagleConfig(
    family="eagle3",
    hidden_size=16,
    target_hidden_size=16,
    vocab_size=40,
    draft_vocab_size=12,
    features=(1, 4, 6),
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
)
EAGLE1 = replace(EAGLE3, family="eagle", draft_vocab_size=None, features="last", fc_bias=True)
MEDUSA = MedusaConfig(
    hidden_size=16, vocab_size=40, draft_vocab_size=40, num_heads=3, choices=((0,), (1,), (0, 0))
)


@pytest.mark.parametrize("name", CASES)
def test_every_eagle_head_that_can_be_read_can_be_written(name: str, tmp_path: Path) -> None:
    head = read_eagle_head(CASES[name].save(tmp_path / "given"), TARGET)
    save_eagle_head(tmp_path / "written", head, target="x/y", dtype=torch.float32)
    again = read_eagle_head(tmp_path / "written", TARGET)
    assert again.config == replace(head.config, rope=again.config.rope)
    assert dict(again.config.rope) == dict(head.config.rope)
    expected = head.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    ids = (head.draft_to_target, again.draft_to_target)
    assert ids == (None, None) or torch.equal(*ids)  # type: ignore[arg-type]


def test_an_eagle3_head_has_its_authors_layout(tmp_path: Path) -> None:
    head = build_eagle_head(replace(EAGLE3, rope={**LLAMA3_ROPE, "rope_theta": 500000.0}))
    head.draft_to_target = DRAFT_IDS
    save_eagle_head(tmp_path, head, target="x/y")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (16, 48),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (24, 32),
        "midlayer.self_attn.k_proj.weight": (12, 32),
        "midlayer.self_attn.v_proj.weight": (12, 32),
        "midlayer.self_attn.o_proj.weight": (16, 24),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.mlp.gate_proj.weight": (20, 16),
        "midlayer.mlp.up_proj.weight": (20, 16),
        "midlayer.mlp.down_proj.weight": (16, 20),
        "norm.weight": (16,),
        "lm_head.weight": (12, 16),
        "d2t": (12,),
        "t2d": (40,),
    }
    assert {tensor.dtype for name, tensor in tensors.items() if "weight" in name} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (torch.arange(12) + tensors["d2t"]).tolist() == DRAFT_IDS.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["num_hidden_layers"], config["rope_theta"]) == (
        12,
        1,
        500000.0,
    )
    assert config["rope_scaling"]["rope_type"] == "llama3"
    # Each convention in the place of its readers.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert read_eagle_head(tmp_path, TARGET).config.features == (1, 4, 6)


def test_the_embeddings_as_a_feature_are_no_layers_output(tmp_path: Path) -> None:
    save_eagle_head(
        tmp_path, build_eagle_head(replace(EAGLE3, features=(0, 4, 6), draft_vocab_size=40)), target="x/y"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]
    assert read_eagle_head(tmp_path, TARGET).config.features == (0, 4, 6)


def test_an_eagle1_head_has_its_authors_layout(tmp_path: Path) -> None:
    save_eagle_head(tmp_path, build_eagle_head(EAGLE1), target="x/y", dtype=torch.float16)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"} < names
    assert not names & {
        "layers.0.input_layernorm.weight",
        "norm.weight",
        "lm_head.weight",
        "embed_tokens.weight",
    }
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is True


@pytest.mark.parametrize(
    ("config", "ids", "file", "names"),
    [
        (MEDUSA, None, "medusa_lm_head.safetensors", {"2.0.linear.weight", "2.0.linear.bias", "2.1.weight"}),
        (
            replace(MEDUSA, num_layers=2),
            None,
            "medusa_lm_head.safetensors",
            {"2.1.linear.bias", "2.2.weight"},
        ),
        (replace(MEDUSA, draft_vocab_size=None), None, "medusa_lm_head.safetensors", {"2.0.linear.weight"}),
        (
            replace(MEDUSA, draft_vocab_size=12, block_bias=False),
            DRAFT_IDS,
            "model.safetensors",
            {"blocks.2.layers.0.weight", "lm_heads.2.weight", "token_map"},
        ),
        (replace(MEDUSA, shared_lm_head=True), None, "model.safetensors", {"lm_heads.0.weight"}),
    ],
)
def test_medusa_heads_are_read_as_they_were_written(
    config: MedusaConfig, ids: torch.Tensor | None, file: str, names: set[str], tmp_path: Path
) -> None:
    heads = MedusaHeads(config)
    heads.draft_to_target = ids
    save_medusa_heads(tmp_path, heads, target="x/y", dtype=torch.float32)
    assert names <= set(load_file(tmp_path / file))
    again = read_medusa_heads(tmp_path, TARGET)
    assert again.config == config
    expected = heads.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert (again.draft_to_target is None) == (ids is None)


def test_a_head_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        head = build_eagle_head(replace(EAGLE3, draft_vocab_size=40))
        save_eagle_head(tmp_path, head, target="x/y", dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(
        read_eagle_head(tmp_path, TARGET).state_dict()["fc.weight"], head.state_dict()["fc.weight"]
    )
