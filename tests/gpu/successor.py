"""Models whose greedy answer is known, and drafts that are right as often as a script says.

A successor model has the shape and the weights of any other, and its logits say "the next token is this one
plus one": what layers add to the residual stream is scaled to next to nothing, and the head's rows are the
embedding's, moved on by one. All arithmetic and all memory traffic are there, and no near-tie.
"""

import random
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.model.attention.interface import ATTENTION_NAME, register
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.speculation.base import DraftRequest, ProposalContext, Requirements, Speculator
from engine.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab_size: int


def successor_model(
    name: str, shape: ModelShape, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """A Llama of that shape with random weights that counts upwards."""
    register()
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max_model_len,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
        embedding = module.model.embed_tokens.weight.normal_()
        module.lm_head.weight.copy_(embedding.roll(1, 0))
    return wrap_model(module, None, name=name, max_model_len=max_model_len)


class ScriptedAcceptance:
    """A speculator whose trees keep their shape and get tokens that a successor model accepts now and then.

    Args:
        inner: Drafts for real, at its cost.
        rate: Chance that the first child of an accepted node is right. If it is wrong, the second, where
            there is one, is right with half that chance.
        vocab_size: Of the successor model.
        seed: Of the script.
    """

    def __init__(self, inner: Speculator, rate: float, vocab_size: int, seed: int = 0) -> None:
        self._inner = inner
        self._rate = rate
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.num_computed_tokens = inner.num_computed_tokens
        self.release = inner.release

    @property
    def requirements(self) -> Requirements:
        """Those of the speculator inside."""
        return self._inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """One tree per request."""
        trees = self._inner.propose(context)
        return [self._script(request, tree) for request, tree in zip(context.requests, trees, strict=True)]

    def _script(self, request: DraftRequest, tree: TokenTree) -> TokenTree:
        tokens = [request.token_ids[-1], *tree.tokens]
        accepted = 0
        for node in range(len(tree) + 1):
            children = tree.children(node)
            for place, child in enumerate(children):
                tokens[child] = (tokens[node] + 2 + place) % self._vocab_size
            if node == accepted and (child := self._chosen(children)):
                tokens[child] = (tokens[node] + 1) % self._vocab_size
                accepted = child
        return TokenTree(tuple(tokens[1:]), tree.parents, tree.proposal, tree.distributions)

    def _chosen(self, children: tuple[int, ...]) -> int:
        """The child that is right; 0 for none."""
        if children and self._random.random() < self._rate:
            return children[0]
        if len(children) > 1 and self._random.random() < self._rate / 2:
            return children[1]
        return 0
