"""Heads that do not fit, and files that are damaged or meant to harm: refused by name, and nothing runs."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelNotFound, ModelNotSupported, StartupError
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.medusa_reading import read_medusa_heads
from tests.speculation.heads.checkpoints import eagle1, eagle3, speculators, write
from tests.speculation.heads.eagle_cases import CASES, with_config
from tests.speculation.heads.reference import Weights
from tests.speculation.heads.running import TARGET
from tests.speculation.heads.test_medusa_formats import CASES as MEDUSA_CASES

Change = Callable[[Weights], object]


def refused(folder: Path, kind: type[StartupError], message: str, **target: Any) -> None:
    with pytest.raises(kind, match=message):
        read_eagle_head(folder, replace(TARGET, **target))


def changed(folder: Path, change: Change) -> Path:
    """The official head with other tensors."""
    eagle3().save(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


# Tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"lacks norm\.weight: it is incomplete"),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), r"lacks layers\.0\.mlp\.up_proj\.weight"),
        (lambda t: t.pop("fc.weight"), r"lacks fc\.weight"),
        (lambda t: t.pop("lm_head.weight"), r"d2t, but no lm_head|lacks lm_head\.weight"),
        (lambda t: t.pop("d2t"), r"lacks d2t"),
        (lambda t: t.update(more=torch.zeros(2)), r"holds more, which nothing in its config"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}), r"is 1, but .* holds 2 layers"),
        (
            lambda t: t.update({"layers.7.mlp.up_proj.weight": torch.zeros(2)}),
            r"lacks layer 1, but has layer 7",
        ),
        (lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(16)}), r"has both .*: one too many"),
        (
            lambda t: t.update({"norm.weight": torch.ones(17)}),
            r"norm\.weight of .* is \[17\]; \[16\] was expected",
        ),
        (lambda t: t.update({"norm.weight": torch.tensor(1.0)}), r"norm\.weight of .* is a single number"),
        (
            lambda t: t.update({"fc.weight": torch.ones(16, 32)}),
            r"fc\.weight of .* is \[16, 32\]; \[16, 48\]",
        ),
        (lambda t: t["fc.weight"].fill_(torch.nan), r"fc\.weight of .* not finite"),
        (lambda t: t["norm.weight"][:1].fill_(torch.inf), r"norm\.weight of .* not finite"),
        (
            lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int8)}),
            r"of type int8: .* not quantised",
        ),
        (
            lambda t: t["d2t"][-1:].add_(1),
            r"d2t of .* points at ids from 1 to 40, but the target's end at 39",
        ),
        (lambda t: t["d2t"][:1].sub_(2), r"d2t of .* points at ids from -1"),
        (lambda t: t["d2t"][1:2].sub_(1), r"two ids of the draft stand for one"),
        (
            lambda t: t.update(d2t=torch.zeros(11, dtype=torch.int64)),
            r"d2t of .* is \[11\]; \[12\] was expected",
        ),
        (
            lambda t: t.update(
                {"lm_head.weight": torch.ones(0, 16), "d2t": torch.zeros(0, dtype=torch.int64)}
            ),
            r"draft_vocab_size in .* is 12, but lm_head\.weight has 0 rows",
        ),
        (lambda t: t.update(d2t=torch.zeros(12)), r"d2t of .* must hold whole numbers, not float32"),
        (lambda t: t.update(t2d=torch.zeros(39, dtype=torch.bool)), r"t2d of .* is \[39\]; \[40\]"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.ones(41, 16)}),
            r"embed_tokens\.weight .* \[41, 16\], but",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    refused(changed(tmp_path, change), StartupError, message)


def test_values_too_large_for_the_type_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: tensors["fc.weight"].fill_(1e6))
    read_eagle_head(folder, TARGET)
    with pytest.raises(StartupError, match=r"fc\.weight of .* not finite in float16"):
        read_eagle_head(folder, TARGET, dtype=torch.float16)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("bias", "fc.bias"),
        ("attention_bias", "layers.0.self_attn.o_proj.bias"),
        ("mlp_bias", "layers.0.mlp.up_proj.bias"),
        ("norm_before_fc", "input_norm.weight"),
        ("fc_norm", "fc_norm.2.weight"),
    ],
)
def test_a_part_that_the_config_promises_is_missed(field: str, name: str, tmp_path: Path) -> None:
    refused(
        with_config(eagle3(), **{field: True}).save(tmp_path), StartupError, rf"lacks .*{re.escape(name)}"
    )


# Another target


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 24}, r"reads hidden states of width 16, but the target's are 24 wide"),
        ({"vocab_size": 41}, r"vocabulary of 40 tokens, but the target has 41"),
    ],
)
@pytest.mark.parametrize("name", ["official", "speculators", "eagle 1", "speculators, eagle 1"])
def test_a_head_for_another_target_is_refused(
    name: str, target: dict[str, int], message: str, tmp_path: Path
) -> None:
    refused(CASES[name].save(tmp_path), ModelNotSupported, message, **target)


def test_layers_that_the_target_does_not_have_are_refused(tmp_path: Path) -> None:
    case = with_config(eagle3(), eagle_aux_hidden_state_layer_ids=[2, 4, 8])
    refused(
        case.save(tmp_path), ModelNotSupported, r"asks for the hidden states \[2, 4, 8\].* 8 layers .* 0 to 7"
    )


def test_two_lists_of_layers_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    lists = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    case = with_config(eagle3(), **lists, eagle_config=lists)
    refused(case.save(tmp_path), ModelNotSupported, "names its layers twice and differently")
    assert read_eagle_head(tmp_path, TARGET, convention="hidden_states").config.features == (2, 4, 5)


def test_a_narrow_head_needs_its_own_ends(tmp_path: Path) -> None:
    case = with_config(eagle3(width=12), target_hidden_size=16)
    refused(case.save(tmp_path), ModelNotSupported, "12 wide and brings no embedding")


# Configs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": -1}, "hidden_size in .* must be a whole number from 1"),
        ({"hidden_size": True}, "hidden_size in .* must be a whole number"),
        ({"intermediate_size": 10**15}, "intermediate_size in .* must be a whole number from 1 to 16777216"),
        ({"num_attention_heads": "4"}, "num_attention_heads in .* not '4'"),
        ({"num_hidden_layers": 16_000_000}, "num_hidden_layers in .* is 16000000, but .* holds 1 layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps in .* finite number above zero"),
        ({"norm_before_residual": "yes"}, "norm_before_residual in .* true or false"),
        ({"hidden_act": "os.system"}, "hidden_act in .* 'os.system', which transformers has not"),
        ({"hidden_act": 3}, "hidden_act in .* must be a string"),
        ({"draft_vocab_size": 13}, "draft_vocab_size in .* is 13, but lm_head.weight has 12 rows"),
        ({"eagle_config": []}, "eagle_config in .* must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -2, 3]}, "must be a list of whole numbers from 0"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states in .* is 4"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor in rope_scaling .* above zero"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
            "for each kind of layer .full_attention",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised heads are not supported"),
        ({"layer_types": ["chunked_attention"]}, "names chunked_attention"),
        ({"layer_types": []}, "layer_types in .* has 0 entries for 1 layers"),
        ({"layer_types": ["sliding_attention"]}, "has no sliding_window"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type in .* is 'dflash'; supported are"),
    ],
)
def test_a_config_that_is_none_is_refused_by_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(with_config(eagle3(), **fields).save(tmp_path), StartupError, message)


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = speculators({"model_type": "deepseek_v3"}).save(tmp_path)
    refused(folder, ModelNotSupported, "model_type in .* is 'deepseek_v3'; .* llama or qwen3")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": ' * 5000, "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    eagle3().save(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(tmp_path, StartupError, r"config\.json")


# Files


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, StartupError, r"config\.json cannot be read")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, ModelNotFound, r"holds no head: it has none of model\.safetensors")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(file: str, share: float, tmp_path: Path) -> None:
    replace(eagle3(), file=file).save(tmp_path)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[: int(len(data) * share)])
    refused(tmp_path, StartupError, rf"{file} cannot be read|more than tensors, or is damaged")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_bytes_that_mean_nothing_are_refused(file: str, tmp_path: Path) -> None:
    eagle3().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for seed in range(20):
        noise = torch.randint(256, (300,), generator=torch.Generator().manual_seed(seed))
        (tmp_path / file).write_bytes(bytes([0x80, 2, *noise.tolist()]))
        refused(tmp_path, StartupError, rf"{file} cannot be read|more than tensors, or is damaged")


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_runs_none(
    as_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "head", eagle3().config, {}, "pytorch_model.bin")
    if as_zip:
        torch.save({"fc.weight": _Harmful()}, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Harmful()}))
    refused(folder, StartupError, "holds more than tensors, or is damaged. A pickle can run any code")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "must hold tensors by name, not a list"),
        ({1: torch.ones(2)}, "must hold tensors by name, not a dict"),
        ({"fc.weight": 3}, r"fc\.weight in .* is a int, not a tensor"),
        ({"fc.weight": {"a": torch.ones(1)}}, r"fc\.weight in .* is a dict, not a tensor"),
        ({"fc.weight": torch.ones(1).expand(10**9, 10**6)}, r"but fewer values are there"),
        ({"fc.weight": torch.eye(3).to_sparse()}, "no plain tensor"),
        ({"fc.weight": torch.empty(3, device="meta")}, "no plain tensor"),
    ],
)
def test_a_pickle_of_other_things_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, eagle3().config, content, "pytorch_model.bin")
    refused(folder, StartupError, message)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    replace(eagle3(), file="pytorch_model.bin").save(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    refused(tmp_path, StartupError, "is compressed")


def test_shards_are_read_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    eagle3().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"part-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert read_eagle_head(tmp_path, TARGET).draft_to_target is not None
    (tmp_path / "part-1.safetensors").unlink()
    refused(
        tmp_path, ModelNotFound, r"lacks part-1\.safetensors, which model\.safetensors\.index\.json names"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
    ],
)
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    eagle3().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, StartupError, r"index\.json (is no index|must name files in its own folder)")


# Medusa


def test_heads_of_the_other_kind_are_told_apart(tmp_path: Path) -> None:
    case = MEDUSA_CASES["vllm"]
    refused(
        write(tmp_path / "medusa", {}, case.tensors),
        ModelNotSupported,
        "of the Medusa kind: serve it with the method",
    )
    with pytest.raises(ModelNotSupported, match="is no Medusa head"):
        read_medusa_heads(eagle1().save(tmp_path / "eagle"), TARGET)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("separate heads", lambda t: t.pop("3.0.linear.bias"), r"lacks blocks\.3\.0\.linear\.bias"),
        ("separate heads", lambda t: t.pop("3.1.weight"), r"lacks lm_heads\.3\.weight"),
        ("separate heads", lambda t: t.pop("3.0.linear.weight"), "lacks head 3, but has head 4"),
        ("separate heads", lambda t: t.update(more=torch.zeros(1)), "holds more, which nothing"),
        (
            "separate heads",
            lambda t: t.update({"2.1.weight": torch.ones(41, 16)}),
            "scores 41 tokens, but the target",
        ),
        ("separate heads", lambda t: t["2.0.linear.weight"].fill_(torch.nan), "not finite"),
        (
            "separate heads",
            lambda t: t.update({"2.0.linear.weight": torch.ones(16, 8)}),
            r"is \[16, 8\]; \[16, 16\]",
        ),
        ("two blocks", lambda t: t.pop("0.1.linear.weight"), r"lacks blocks\.0\.1\.linear\.weight"),
        ("vllm", lambda t: t.pop("lm_heads.1.weight"), r"lacks lm_heads\.1\.weight"),
        (
            "vllm",
            lambda t: t.pop("token_map"),
            r"scores 6 tokens, but the target has 40.* token_map is missing",
        ),
        ("vllm", lambda t: t.update(token_map=torch.zeros(0, dtype=torch.int64)), "token_map of .* is empty"),
        ("vllm", lambda t: t["token_map"][:1].add_(40), "token_map of .* points at ids"),
        ("vllm, whole lm_heads", lambda t: t.pop("token_map"), "lacks token_map"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused_by_name(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    case = MEDUSA_CASES[name]
    tensors = {key: tensor.clone() for key, tensor in case.tensors.items()}
    change(tensors)
    folder = write(tmp_path, case.config or {}, tensors, case.file)
    with pytest.raises(StartupError, match=message):
        read_medusa_heads(folder, TARGET)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 24}, "width 16, but the target's are 24 wide"),
        ({"vocab_size": 32}, "scores 40 tokens"),
    ],
)
def test_medusa_heads_for_another_target_are_refused(
    target: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = MEDUSA_CASES["separate heads"]
    folder = write(tmp_path, {}, case.tensors, case.file)
    with pytest.raises(ModelNotSupported, match=message):
        read_medusa_heads(folder, replace(TARGET, **target))


def test_a_named_tree_is_refused(tmp_path: Path) -> None:
    case = MEDUSA_CASES["separate heads"]
    folder = write(tmp_path, {"medusa_choices": "mc_sim_7b_63"}, case.tensors, case.file)
    with pytest.raises(StartupError, match=r"medusa_choices in .* must be a list of lists"):
        read_medusa_heads(folder, TARGET)
