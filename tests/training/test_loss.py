"""The loss against loops written from the formulas alone: which places count, what they see and say."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from engine.speculation.heads.eagle import EagleHead
from engine.training.objective import Objective, Weights
from engine.training.packing import Batch
from engine.training.passes import PLAIN, EagleDrafter
from engine.training.vocabulary import DraftVocabulary
from tests.training.material import HIDDEN, VOCAB, make_batch, small_head

DRAFT_IDS = torch.tensor([1, 2, 3, 5, 8, 9, 11, 12, 15, 17, 20, 21, 22, 30])


def rope(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary position of one head's vector, by halves (as Llama's)."""
    half = len(vector) // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=vector.dtype) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    )


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


class PlainEagle3:
    """EAGLE-3's layer for one token at a time, keys and values in lists."""

    def __init__(self, head: EagleHead) -> None:
        self.w = dict(head.named_parameters())
        self.config = head.config

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.w["fc.weight"] @ features

    def step(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        position: int,
        seen: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Output and own keys and values [heads, dim]; sees `seen` and itself."""
        w, c = self.w, self.config
        joined = torch.cat(
            (
                rms(embedding, w["layers.0.input_layernorm.weight"]),
                rms(hidden, w["layers.0.hidden_norm.weight"]),
            )
        )
        heads = {
            name: (w[f"layers.0.self_attn.{name}_proj.weight"] @ joined).view(-1, c.head_dim)
            for name in "qkv"
        }
        query = [rope(vector, position) for vector in heads["q"]]
        key = torch.stack([rope(vector, position) for vector in heads["k"]])
        everything = [*seen, (key, heads["v"])]
        out = []
        for number, vector in enumerate(query):
            group = number // (c.num_heads // c.num_kv_heads)
            scores = torch.stack([vector @ k[group] / math.sqrt(c.head_dim) for k, _ in everything])
            shares = scores.softmax(dim=0)
            out.append(sum((share * v[group] for share, (_, v) in zip(shares, everything, strict=True))))
        x = hidden + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(
            [torch.as_tensor(part) for part in out]
        )
        normed = rms(x, w["layers.0.post_attention_layernorm.weight"])
        gate = nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ normed)
        mlp = w["layers.0.mlp.down_proj.weight"] @ (gate * (w["layers.0.mlp.up_proj.weight"] @ normed))
        return x + mlp, (key, heads["v"])

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        return self.w["lm_head.weight"] @ rms(out, self.w["norm.weight"])


def plain_loss(
    head: EagleHead, embeddings: torch.Tensor, batch: Batch, answers: list[list[int]], passes: int
) -> torch.Tensor:
    """0.8^s times the mean over all places of pass s that draft an answer's token behind an answer's token.

    Args:
        answers: Per sequence, which of its places are answers' (contiguous).
    """
    plain = PlainEagle3(head)
    losses: list[list[torch.Tensor]] = [[] for _ in range(passes)]
    answer_index = 0
    for number in range(len(batch.bounds) - 1):
        begin, end = batch.bounds[number], batch.bounds[number + 1]
        tokens = batch.token_ids[begin:end].tolist()
        first_answer = answers[number][0]
        text: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(len(tokens) - 1):
            fused = plain.fuse(batch.hidden[begin + i, :-HIDDEN])
            out, kept = plain.step(embeddings[tokens[i + 1]], fused, i, text)
            text.append(kept)
            own: list[tuple[torch.Tensor, torch.Tensor]] = []
            for s in range(passes):
                drafted = i + s + 2
                if s:
                    if drafted - 1 > answers[number][-1]:
                        break
                    out, kept = plain.step(embeddings[tokens[i + 1 + s]], out, i + s, [*text, *own])
                    own.append(kept)
                if i + 1 not in answers[number] or drafted not in answers[number]:
                    continue
                place = answer_index + drafted - first_answer
                law = torch.zeros(VOCAB)
                law[batch.top_ids[place]] = batch.top_logprobs[place].exp()
                if int(batch.top_ids[place, 0]) not in DRAFT_IDS.tolist():
                    continue
                wanted = law[DRAFT_IDS] / law[DRAFT_IDS].sum()
                losses[s].append(-(wanted * plain.logits(out).log_softmax(dim=0)).sum())
        answer_index += len(answers[number])
    return sum(
        (0.8**s * torch.stack(parts).mean() for s, parts in enumerate(losses) if parts), torch.zeros(())
    )


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_loss_of_eagle3_and_its_gradient_are_those_of_a_plain_loop(passes: int) -> None:
    batch, answers = make_batch([(3, 5), (1, 2), (4, 7), (2, 1)])
    head, embeddings = small_head(DRAFT_IDS)
    objective = Objective(
        EagleDrafter(head, embeddings, torch.zeros(0)), DraftVocabulary.of(DRAFT_IDS, VOCAB), Weights()
    )
    loss = objective.loss(batch, passes, PLAIN).total
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}  # type: ignore[union-attr]
    head.zero_grad()
    expected = plain_loss(head, embeddings, batch, answers, passes)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
