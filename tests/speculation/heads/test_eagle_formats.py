"""EAGLE heads in every format compute what the formulas say, and every option matters."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.speculation.heads.config import default_features
from engine.speculation.heads.eagle import Eagle3Head
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.layers import JoiningLayer
from tests.speculation.heads.checkpoints import DRAFT_IDS, Case, eagle1, eagle3, vocabulary
from tests.speculation.heads.eagle_cases import CASES, with_config
from tests.speculation.heads.reference import Parts, ReferenceEagle, random_weights
from tests.speculation.heads.running import TARGET, run_eagle

TOKENS = [3, 14, 15, 9, 26, 5]
DRAFTS = [35, 8, 9]
_GENERATOR = torch.Generator().manual_seed(5)
EMBEDDING = torch.randn(40, 16, generator=_GENERATOR)
LM_HEAD = torch.randn(40, 16, generator=_GENERATOR) * 0.3
FEATURES = torch.randn(len(TOKENS), 3, 16, generator=_GENERATOR)
TOLERANCE = 1e-4


def reference(parts: Parts, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    weights = random_weights(parts) if weights is None else weights
    head = ReferenceEagle(parts, weights, EMBEDDING, LM_HEAD)
    return head.run(FEATURES[:, : parts.num_features], TOKENS, DRAFTS).float()


def read_and_run(case: Case, folder: Path) -> torch.Tensor:
    head = read_eagle_head(case.save(folder), TARGET)
    features = FEATURES[:, : case.parts.num_features]
    return run_eagle(head, EMBEDDING, LM_HEAD, features, TOKENS, DRAFTS)


@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_what_the_formulas_say(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.testing.assert_close(
        read_and_run(case, tmp_path), reference(case.parts), atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("name", CASES)
def test_a_head_knows_its_vocabulary_and_its_features(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    head = read_eagle_head(case.save(tmp_path), TARGET)
    assert head.config.features == case.states
    if case.ids is None:
        assert head.draft_to_target is None
    else:
        assert head.draft_to_target is not None
        assert head.draft_to_target.tolist() == case.ids.tolist()


@pytest.mark.parametrize(
    "option",
    [
        *("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"),
        *("fc_bias", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"),
        *("embedding_norm", "hidden_norm", "input_norm", "output_norm"),
    ],
)
def test_every_option_matters(option: str) -> None:
    """Otherwise agreement with the reference would show nothing."""
    assert option in {each.name for each in fields(Parts)}
    first = option in ("embedding_norm", "hidden_norm", "input_norm", "output_norm")
    parts = eagle1().parts if first else eagle3().parts
    change: dict[str, Any] = {option: True}
    chosen = replace(parts, **change)
    weights = random_weights(chosen)
    bare = {name: tensor for name, tensor in weights.items() if name in random_weights(parts)}
    assert (reference(chosen, weights) - reference(parts, bare)).abs().max() > 100 * TOLERANCE


def test_what_is_fed_back_matters_to_drafts_alone() -> None:
    parts = eagle3().parts
    weights = random_weights(parts)
    difference = (
        (reference(replace(parts, norm_output=True), weights) - reference(parts, weights)).abs().amax(dim=1)
    )
    assert difference[: len(TOKENS) + 0].max() == 0
    assert difference[len(TOKENS) :].min() > 100 * TOLERANCE


def test_a_wrong_order_of_features_or_inputs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(CASES["official"].parts)
    swapped = FEATURES.flip(1)
    head = read_eagle_head(CASES["official"].save(tmp_path), TARGET)
    assert (run_eagle(head, EMBEDDING, LM_HEAD, swapped, TOKENS, DRAFTS) - expected).abs().max() > 0.01

    def joined_the_other_way(
        self: JoiningLayer, embeddings: torch.Tensor, hidden: torch.Tensor, *rest: object
    ) -> object:
        return forward(self, hidden, embeddings, *rest)  # type: ignore[arg-type]

    forward = JoiningLayer.forward
    monkeypatch.setattr(JoiningLayer, "forward", joined_the_other_way)
    assert (read_and_run(CASES["official"], tmp_path) - expected).abs().max() > 0.01


def test_a_missing_norm_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eagle3Head, "normed", lambda self, out: out)
    case = CASES["official"]
    assert (read_and_run(case, tmp_path) - reference(case.parts)).abs().max() > 0.01


def test_token_map_picks_rows_of_a_whole_lm_head(tmp_path: Path) -> None:
    ids = torch.tensor([3, 1, 17, 39, 5])
    weights = random_weights(eagle1().parts) | {"lm_head.weight": LM_HEAD}
    case = replace(eagle1(), extra={"token_map": ids, "lm_head.weight": LM_HEAD}, file="model.safetensors")
    expected = reference(eagle1().parts, weights)[:, ids]
    torch.testing.assert_close(read_and_run(case, tmp_path), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_weights_get_the_type_that_is_asked_for(tmp_path: Path) -> None:
    head = read_eagle_head(CASES["official"].save(tmp_path), TARGET, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert not head.training
    x = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    out = head(x, x, torch.tensor([[4]]), lambda layer, q, k, v: v.repeat_interleave(2, 1).transpose(1, 2))
    assert out.dtype == torch.bfloat16


def test_a_head_for_tied_embeddings_takes_the_targets(tmp_path: Path) -> None:
    """A frozen copy is of no use where the target's own modules do the same, and scale as it does."""
    case = eagle3(draft_vocab=None)
    fields = {**case.config, "tie_word_embeddings": True}
    fields.pop("draft_vocab_size")
    case = replace(case, config=fields, extra={"embed_tokens.weight": EMBEDDING})
    tied = replace(TARGET, ties_embeddings=True)
    head = read_eagle_head(case.save(tmp_path), tied)
    assert head.embed_tokens is None
    assert head.lm_head is None
    target_lm_head = nn.Identity()
    x = torch.randn(1, 1, 16)
    assert torch.equal(head.logits(x, target_lm_head), head.normed(x))


# Which states of the target


@pytest.mark.parametrize(
    ("config", "convention", "states"),
    [
        ({}, None, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, None, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, None, (2, 4, 7)),
        ({"target_layer_ids": [1, 3, 6]}, None, (2, 4, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "layer_outputs", (2, 4, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "hidden_states", (1, 3, 6)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
            },
            None,
            (2, 4, 7),
        ),
        ({}, "layer_outputs", (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, None, (2, 4, 5)),
    ],
)
def test_layer_ids_are_read_by_the_convention_of_their_place(
    config: dict[str, object], convention: str | None, states: tuple[int, ...], tmp_path: Path
) -> None:
    case = with_config(eagle3(), **config)
    head = read_eagle_head(case.save(tmp_path), TARGET, convention=convention)  # type: ignore[arg-type]
    assert head.config.features == states


@pytest.mark.parametrize(
    ("num_layers", "states"),
    [(30, (2, 15, 27)), (32, (2, 16, 29)), (2, (1, 1, 1)), (1, (0, 0, 0)), (6, (2, 3, 3))],
)
def test_default_features(num_layers: int, states: tuple[int, ...]) -> None:
    assert default_features(num_layers) == states


def test_vocabulary_helper_is_the_formats_rule() -> None:
    assert (torch.arange(12) + vocabulary()["d2t"]).tolist() == DRAFT_IDS.tolist()
