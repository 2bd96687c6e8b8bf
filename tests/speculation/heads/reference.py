"""What heads compute, written from the papers' formulas with loops over tokens and heads, in float64.

It knows nothing of the engine's modules: weights are a plain dictionary, parts are chosen by `Parts`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """Which parts a head has, and its sizes."""

    family: str = "eagle3"
    width: int = 16
    target_width: int = 16
    vocab: int = 40
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 6
    inner: int = 20
    draft_vocab: int | None = 12
    num_features: int = 3
    fc: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    embedding_norm: bool = False
    hidden_norm: bool = False
    input_norm: bool = False
    output_norm: bool = False
    own_embeddings: bool = False
    tied: bool = False
    eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    windows: tuple[int | None, ...] = (None, None)


class _Collector:
    """Random tensors by name, each linear layer's outputs about as large as its inputs."""

    def __init__(self, seed: int) -> None:
        self.tensors: Weights = {}
        self._generator = torch.Generator().manual_seed(seed)

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + torch.randn(size, generator=self._generator) * 0.4

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        weight = torch.randn(rows, columns, generator=self._generator)
        self.tensors[f"{name}.weight"] = weight / math.sqrt(columns)
        if bias:
            self.tensors[f"{name}.bias"] = torch.randn(rows, generator=self._generator) * 0.4


def random_weights(parts: Parts, seed: int = 0) -> Weights:
    """Weights under the names that vLLM and speculators give them."""
    made = _Collector(seed)
    third = parts.family == "eagle3"
    features = parts.num_features * parts.target_width
    if parts.fc:
        made.linear("fc", parts.width, features if third else 2 * parts.width, bias=parts.fc_bias)
    if parts.norm_before_fc:
        made.norm("input_norm", features)
    for index in range(parts.num_features if parts.fc_norm else 0):
        made.norm(f"fc_norm.{index}", parts.target_width)
    optional = {
        "embedding_layernorm": parts.embedding_norm,
        "hidden_states_layernorm": parts.hidden_norm,
        "pre_lm_head_layernorm": parts.output_norm,
        "norm": third,
        "layers.0.hidden_norm": third,
    }
    for name in (name for name, is_there in optional.items() if is_there):
        made.norm(name, parts.width)
    for index in range(parts.num_layers):
        _add_layer(made, parts, index)
    if parts.draft_vocab is not None:
        made.linear("lm_head", parts.draft_vocab, parts.width)
    if parts.own_embeddings:
        made.linear("embed_tokens", parts.vocab, parts.width)
    return made.tensors


def _add_layer(made: _Collector, parts: Parts, index: int) -> None:
    layer, attention = f"layers.{index}", f"layers.{index}.self_attn"
    if parts.family == "eagle3" or index or parts.input_norm:
        made.norm(f"{layer}.input_layernorm", parts.width)
    columns = 2 * parts.width if parts.family == "eagle3" and index == 0 else parts.width
    for name, heads in (("q", parts.num_heads), ("k", parts.num_kv_heads), ("v", parts.num_kv_heads)):
        made.linear(f"{attention}.{name}_proj", heads * parts.head_dim, columns, bias=parts.qkv_bias)
    made.linear(f"{attention}.o_proj", parts.width, parts.num_heads * parts.head_dim, bias=parts.o_bias)
    for name in ("q_norm", "k_norm") if parts.qk_norm else ():
        made.norm(f"{attention}.{name}", parts.head_dim)
    made.norm(f"{layer}.post_attention_layernorm", parts.width)
    for name in ("gate_proj", "up_proj"):
        made.linear(f"{layer}.mlp.{name}", parts.inner, parts.width, bias=parts.mlp_bias)
    made.linear(f"{layer}.mlp.down_proj", parts.width, parts.inner, bias=parts.mlp_bias)


class ReferenceEagle:
    """One text, one token at a time; keys and values of all that came before are kept in lists."""

    def __init__(
        self, parts: Parts, weights: Weights, embedding: torch.Tensor, lm_head: torch.Tensor
    ) -> None:
        self.parts = parts
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        own = self.weights.get("embed_tokens.weight")
        self.embedding = own if parts.own_embeddings and own is not None else embedding.double()
        self.lm_head = lm_head.double()
        if "lm_head.weight" in self.weights:
            self.lm_head = self.weights["lm_head.weight"]
        elif parts.tied:
            self.lm_head = self.embedding
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(parts.num_layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(parts.num_layers)]
        self.frequencies, self.magnitude = frequencies(parts.head_dim, parts.rope)

    def run(
        self, features: torch.Tensor, tokens: list[int], drafts: list[int], first_position: int = 0
    ) -> torch.Tensor:
        """Logits behind each token of a text, whose features are known, and behind each drafted token.

        Args:
            features: [len(tokens), num_features, target_width], of the token *before* each.
            tokens: The text.
            drafts: Tokens that follow, whose features the head makes up itself.
            first_position: Position of the first token.

        Returns:
            [len(tokens) + len(drafts), rows].
        """
        rows = []
        carried = torch.zeros(0)
        for place, token in enumerate([*tokens, *drafts]):
            hidden = self.fuse(features[place].double()) if place < len(tokens) else carried
            logits, carried = self.step(self.embedding[token], hidden, first_position + place)
            rows.append(logits)
        return torch.stack(rows)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        parts = self.parts
        if parts.family == "eagle":
            return features[0]
        joined = torch.cat(list(features))
        if parts.norm_before_fc:
            joined = self.norm(joined, "input_norm")
        if parts.fc_norm:
            pieces = [
                self.norm(joined[i * parts.target_width : (i + 1) * parts.target_width], f"fc_norm.{i}")
                for i in range(parts.num_features)
            ]
            joined = torch.cat(pieces)
        return self.linear(joined, "fc") if parts.fc else joined

    def step(
        self, embedding: torch.Tensor, hidden: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        if parts.family == "eagle":
            if parts.embedding_norm:
                embedding = self.norm(embedding, "embedding_layernorm")
            if parts.hidden_norm:
                hidden = self.norm(hidden, "hidden_states_layernorm")
            x = self.linear(torch.cat([embedding, hidden]), "fc")
        for index in range(parts.num_layers):
            layer = f"layers.{index}"
            if parts.family == "eagle3" and index == 0:
                normed = self.norm(hidden, f"{layer}.hidden_norm")
                residual = normed if parts.norm_before_residual else hidden
                read = torch.cat([self.norm(embedding, f"{layer}.input_layernorm"), normed])
            elif index or parts.input_norm:
                residual, read = x, self.norm(x, f"{layer}.input_layernorm")
            else:
                residual, read = x, x
            x = residual + self.attention(read, index, position)
            x = x + self.feed_forward(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        if parts.family == "eagle":
            scored = self.norm(x, "pre_lm_head_layernorm") if parts.output_norm else x
            return self.lm_head @ scored, x
        scored = self.norm(x, "norm")
        return self.lm_head @ scored, scored if parts.norm_output else x

    def attention(self, x: torch.Tensor, index: int, position: int) -> torch.Tensor:
        parts, name = self.parts, f"layers.{index}.self_attn"
        queries = self.linear(x, f"{name}.q_proj").reshape(parts.num_heads, parts.head_dim)
        keys = self.linear(x, f"{name}.k_proj").reshape(parts.num_kv_heads, parts.head_dim)
        values = self.linear(x, f"{name}.v_proj").reshape(parts.num_kv_heads, parts.head_dim)
        if parts.qk_norm:
            queries = torch.stack([self.norm(query, f"{name}.q_norm") for query in queries])
            keys = torch.stack([self.norm(key, f"{name}.k_norm") for key in keys])
        self.keys[index].append(torch.stack([self.rotated(key, position) for key in keys]))
        self.values[index].append(values)
        window = parts.windows[index]
        out = []
        for head in range(parts.num_heads):
            query = self.rotated(queries[head], position)
            group = head // (parts.num_heads // parts.num_kv_heads)
            begin = 0 if window is None else max(0, len(self.keys[index]) - window)
            scores = [
                float(query @ key[group]) / math.sqrt(parts.head_dim) for key in self.keys[index][begin:]
            ]
            shares = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
            seen = self.values[index][begin:]
            out.append(sum(share * value[group] for share, value in zip(shares, seen, strict=True)))
        return self.linear(torch.cat([torch.as_tensor(each) for each in out]), f"{name}.o_proj")

    def feed_forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(
            gate / (1 + torch.exp(-gate)) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position * self.frequencies[i]
            c, s = math.cos(angle) * self.magnitude, math.sin(angle) * self.magnitude
            out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
        return out

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.parts.eps) * self.weights[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias


def reference_medusa(
    weights: Weights, num_layers: int, hidden: torch.Tensor, lm_heads: list[torch.Tensor]
) -> torch.Tensor:
    """Scores of each head, [num_heads, rows], from weights `{i}.{j}.linear.*`."""
    rows = []
    for head, lm_head in enumerate(lm_heads):
        x = hidden.double()
        for layer in range(num_layers):
            z = weights[f"{head}.{layer}.linear.weight"].double() @ x
            if f"{head}.{layer}.linear.bias" in weights:
                z = z + weights[f"{head}.{layer}.linear.bias"].double()
            x = x + z / (1 + torch.exp(-z))
        rows.append(lm_head.double() @ x)
    return torch.stack(rows)


def frequencies(head_dim: int, rope: dict[str, Any]) -> tuple[list[float], float]:
    """Rotary frequencies (Su et al. 2021) and a factor on cosine and sine.

    Scaled as Llama 3.1 does, linearly (Chen et al. 2023), or by YaRN (Peng et al. 2023).
    """
    plain = [rope["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = rope["rope_type"]
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return [each / factor for each in plain], 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        scaled = []
        for each in plain:
            turns = original * each / (2 * math.pi)
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            scaled.append(share * each + (1 - share) * each / factor)
        return scaled, 1.0

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    shares = [min(max((i - first) / max(last - first, 0.001), 0.0), 1.0) for i in range(head_dim // 2)]
    scaled = [share * each / factor + (1 - share) * each for share, each in zip(shares, plain, strict=True)]
    return scaled, 0.1 * math.log(factor) + 1
