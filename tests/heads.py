"""Draft heads for tiny models: random ones, and ones that have learnt a few texts, to be accepted there."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from engine.speculation.heads.config import EagleConfig, EagleFamily, Features, MedusaConfig
from engine.speculation.heads.eagle import EagleHead, build_eagle_head
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.target_ends import TargetEnds
from tests.tiny import VOCAB_SIZE, tiny_model

HIDDEN = 32
NUM_TRAINING_STEPS = 60
PROMPTS = (
    "one two one two one two",
    "the cat sat on the mat, the cat sat on",
    "abcabcabcabc",
    "a",
    "hello hello hello hello",
    "x = 1\ny = 2\nx = 1\ny = 2\n",
    "0101010101010101",
    "zzzzzzzzzz",
)
FAMILIES: tuple[EagleFamily, ...] = ("eagle", "eagle3")
DRAFT_IDS = torch.tensor([*range(1, 128, 2), *range(0, 128, 2), 200, 257])
"""A draft vocabulary for tiny heads: in no order, and without most of the ids."""


def eagle_config(family: EagleFamily, **changes: Any) -> EagleConfig:
    """A head for the tiny models; EAGLE-3 with a vocabulary of its own, EAGLE-1 with the target's."""
    parts: dict[str, Any] = {
        "family": family,
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": len(DRAFT_IDS) if family == "eagle3" else None,
        "features": (0, 1, 0) if family == "eagle3" else "last",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "fc_bias": family == "eagle",
    }
    return EagleConfig(**(parts | changes))


def random_eagle(config: EagleConfig, seed: int = 0, *, scale: float = 0.4) -> EagleHead:
    """A head with seeded weights, large enough that every part of it matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build_eagle_head(config)
        for parameter in head.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=scale)
            else:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if config.draft_vocab_size == len(DRAFT_IDS):
        head.draft_to_target = DRAFT_IDS.clone()
    return head.eval().requires_grad_(False)


def random_medusa(num_heads: int = 3, seed: int = 0, **changes: Any) -> MedusaHeads:
    """Heads with seeded weights."""
    parts: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": len(DRAFT_IDS),
        "num_heads": num_heads,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = MedusaHeads(MedusaConfig(**(parts | changes)))
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    if heads.config.draft_vocab_size == len(DRAFT_IDS):
        heads.draft_to_target = DRAFT_IDS.clone()
    return heads.eval().requires_grad_(False)


def features_of(module: PreTrainedModel, tokens: Sequence[int], features: Features) -> torch.Tensor:
    """Every position's features as transformers gives them, [len(tokens), width]."""
    with torch.inference_mode():
        states = module(
            torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False
        ).hidden_states
    picked = [states[-1]] if features == "last" else [states[layer] for layer in features]
    return torch.cat(picked, dim=-1)[0].clone()


def dense_attention(config: EagleConfig) -> Callable[..., torch.Tensor]:
    """Causal attention over a whole text."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /) -> torch.Tensor:
        group = config.num_heads // config.num_kv_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=config.scale)
        return out.transpose(1, 2)

    return attend


@cache
def _texts() -> torch.Tensor:
    """Beginnings of greedy texts of the tiny target, each of its own prompt, [num_texts, length]."""
    module = tiny_model(attention="eager")
    texts = []
    for prompt in PROMPTS:
        tokens = list(prompt.encode())
        while len(tokens) < 56:
            with torch.inference_mode():
                tokens.append(int(module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        texts.append(tokens)
    return torch.tensor(texts)


def _learn(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    module.requires_grad_(True)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(NUM_TRAINING_STEPS):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.eval().requires_grad_(False)


@cache
def _trained_eagle(family: EagleFamily) -> EagleHead:
    config = eagle_config(family, draft_vocab_size=VOCAB_SIZE if family == "eagle3" else None)
    head = random_eagle(config, scale=0.1)
    module = tiny_model(attention="eager")
    ends, tokens = TargetEnds(module, VOCAB_SIZE), _texts()
    features = torch.stack([features_of(module, text, config.features) for text in tokens.tolist()])
    attend, positions = dense_attention(config), torch.arange(tokens.shape[1] - 2)[None]

    def loss() -> torch.Tensor:
        """Of the tokens behind each position, and of those one further, from the head's own states."""
        out = head(ends.embed(tokens[:, 1:-1]), head.fuse(features[:, :-2]), positions, attend)
        first = head.logits(out, ends.score)
        again = head(ends.embed(tokens[:, 2:-1]), head.carried(out)[:, :-1], positions[:, 1:], attend)
        second = head.logits(again, ends.score)
        return _cross_entropy(first, tokens[:, 2:]) + _cross_entropy(second, tokens[:, 3:])

    _learn(head, loss)
    return head


@cache
def _trained_medusa() -> MedusaHeads:
    heads = random_medusa(3, draft_vocab_size=VOCAB_SIZE)
    module = tiny_model(attention="eager")
    ends, tokens = TargetEnds(module, VOCAB_SIZE), _texts()
    states = torch.stack([features_of(module, text, "last")[:-4] for text in tokens.tolist()])
    wanted = torch.stack([tokens[:, 2 + head : tokens.shape[1] - 2 + head] for head in range(3)])
    _learn(heads, lambda: _cross_entropy(heads(states, ends.score), wanted))
    return heads


def _cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), tokens.flatten())


def trained_eagle(family: EagleFamily) -> EagleHead:
    """A head that has learnt the texts of the tiny target."""
    trained = _trained_eagle(family)
    head = build_eagle_head(trained.config)
    head.load_state_dict(trained.state_dict())
    return head.eval().requires_grad_(False)


def trained_medusa() -> MedusaHeads:
    """Heads that have."""
    trained = _trained_medusa()
    heads = MedusaHeads(trained.config)
    heads.load_state_dict(trained.state_dict())
    return heads.eval().requires_grad_(False)
