"""An EAGLE head's EagleConfig, from its config.json and the tensors that are there."""

from dataclasses import dataclass

from transformers.activations import ACT2FN

from engine.errors import ModelNotSupported, StartupError
from engine.speculation.heads.checkpoint import Checkpoint
from engine.speculation.heads.config import EagleConfig, EagleFamily, Features
from engine.speculation.heads.eagle_features import LayerConvention, read_features
from engine.speculation.heads.eagle_names import layer_of
from engine.speculation.heads.fields import Fields
from engine.speculation.heads.filling import count_of
from engine.speculation.heads.rope import read_rope
from engine.speculation.heads.target import TargetShape

_LAYER_TYPES = ("llama", "qwen3")
_SPECULATORS: dict[str, EagleFamily] = {"eagle": "eagle", "eagle3": "eagle3"}


@dataclass(frozen=True, slots=True)
class _Source:
    """What a config is read from.

    Attributes:
        head: The fields of the head.
        layer: The fields of its decoder layers: the same, or a section in speculators' format.
        tensors: By the modules' names.
        target: The target.
        is_speculators: Whether it is speculators' format.
    """

    head: Fields
    layer: Fields
    tensors: Checkpoint
    target: TargetShape
    is_speculators: bool

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self.tensors.names


def read_eagle_config(
    fields: Fields, tensors: Checkpoint, target: TargetShape, convention: LayerConvention | None
) -> EagleConfig:
    """What the head is made of.

    Optional parts (biases, norms) are there if their tensors are or the config says so; a part that the
    config promises without its tensors is then missed by name.

    Args:
        fields: The head's config.json.
        tensors: Its tensors, by the modules' names.
        target: The target.
        convention: See read_features.

    Raises:
        ModelNotSupported: The head is of another kind, or for another target.
        StartupError: A field is missing or wrong.
    """
    is_speculators = fields.has("speculators_model_type")
    layer = fields.section("transformer_layer_config") if is_speculators else fields
    source = _Source(fields, layer, tensors, target, is_speculators)
    family = _family(source)
    if fields.has("quantization_config") or layer.has("quantization_config"):
        raise ModelNotSupported(f"quantization_config in {fields.where}: quantised heads are not supported")
    if family == "eagle3":
        return _eagle3(source, convention)
    return _eagle1(source)


def _family(source: _Source) -> EagleFamily:
    if source.is_speculators:
        name = source.head.text("speculators_model_type", "")
        kind = source.layer.text("model_type", "llama")
        if name not in _SPECULATORS:
            raise ModelNotSupported(
                f"speculators_model_type in {source.head.where} is {name!r}; supported are "
                f"{' and '.join(_SPECULATORS)}"
            )
        if kind not in _LAYER_TYPES:
            raise ModelNotSupported(
                f"model_type in {source.layer.where} is {kind!r}; heads may have the layers of "
                f"{' or '.join(_LAYER_TYPES)}"
            )
        return _SPECULATORS[name]
    return "eagle3" if source.has("layers.0.hidden_norm.weight") else "eagle"


def _eagle3(source: _Source, convention: LayerConvention | None) -> EagleConfig:
    head, target = source.head, source.target
    features = read_features(head, target, convention)
    rows, is_tied = _output_rows(source)
    owns = source.has("embed_tokens.weight") and (
        head.flag("embed_requires_grad") or is_tied or source.layer.size("hidden_size") != target.hidden_size
    )
    _check_widths(source, needs_same=not owns or (rows is None and not is_tied))
    return _config(
        source,
        family="eagle3",
        features=features,
        draft_vocab_size=rows,
        own_embeddings=owns,
        tied_lm_head=is_tied,
        has_fc=source.has("fc.weight") or features != "last",
        norm_before_fc=head.flag("norm_before_fc") or source.has("input_norm.weight"),
        fc_norm=head.flag("fc_norm") or source.has("fc_norm.0.weight"),
        # vLLM, which such heads are made for, takes it for granted where a config is silent.
        norm_before_residual=head.flag("norm_before_residual", default=source.is_speculators),
        norm_output=head.flag("norm_output"),
    )


def _eagle1(source: _Source) -> EagleConfig:
    _check_widths(source, needs_same=True)
    has_norms = source.head.flag("layernorms") or source.layer.flag("add_para_norm")
    return _config(
        source,
        family="eagle",
        features="last",
        draft_vocab_size=source.tensors.rows("token_map"),
        embedding_norm=has_norms or source.has("embedding_layernorm.weight"),
        hidden_norm=source.layer.flag("add_para_norm") or source.has("hidden_states_layernorm.weight"),
        input_norm=source.head.flag("layernorms") or source.has("layers.0.input_layernorm.weight"),
        output_norm=source.head.flag("layernorms") or source.has("pre_lm_head_layernorm.weight"),
    )


def _config(source: _Source, *, family: EagleFamily, features: Features, **parts: object) -> EagleConfig:
    """What all heads have, and the parts that one has."""
    head, layer, tensors = source.head, source.layer, source.tensors
    num_layers = count_of(
        (index for name in tensors.names if (index := layer_of(name)) is not None), "layer", tensors
    )
    wanted = layer.size("num_hidden_layers", 1)
    if num_layers != wanted:
        raise StartupError(
            f"num_hidden_layers in {layer.where} is {wanted}, but {tensors.what} holds {num_layers} layers"
        )
    width, num_heads = layer.size("hidden_size"), layer.size("num_attention_heads")
    activation = layer.text("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ModelNotSupported(f"hidden_act in {layer.where} is {activation!r}, which transformers has not")
    attention = "layers.0.self_attn"
    biased = any(source.has(f"{attention}.{name}_proj.bias") for name in "qkv")
    says_bias = layer.flag("attention_bias")
    return EagleConfig(
        family=family,
        features=features,
        hidden_size=width,
        target_hidden_size=source.target.hidden_size,
        vocab_size=source.target.vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=layer.size("num_key_value_heads", num_heads),
        head_dim=layer.size("head_dim", max(width // num_heads, 1)),
        intermediate_size=layer.size("intermediate_size"),
        activation=activation,
        rms_norm_eps=layer.positive("rms_norm_eps", 1e-6),
        rope=read_rope(layer),
        max_positions=layer.size("max_position_embeddings", 2048),
        windows=_windows(layer, num_layers),
        qk_norm=layer.text("model_type", "") == "qwen3" or source.has(f"{attention}.q_norm.weight"),
        qkv_bias=says_bias or layer.flag("qkv_bias") or biased,
        o_bias=says_bias or source.has(f"{attention}.o_proj.bias"),
        mlp_bias=layer.flag("mlp_bias") or source.has("layers.0.mlp.gate_proj.bias"),
        fc_bias=head.flag("bias") or head.flag("fusion_bias") or source.has("fc.bias"),
        **parts,  # type: ignore[arg-type]
    )


def _windows(layer: Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = layer.texts("layer_types")
    if kinds is None:
        # Qwen 3's older spelling; other configs carry a sliding_window that none of their layers has.
        slides = layer.text("model_type", "") == "qwen3" and layer.flag("use_sliding_window")
        first = layer.count("max_window_layers", 28) if slides else num_layers
        kinds = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = kinds[:num_layers]
    if foreign := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ModelNotSupported(
            f"layer_types in {layer.where} names {', '.join(foreign)}; the layers of a head may have "
            "full_attention and sliding_attention"
        )
    if len(kinds) < num_layers:
        raise StartupError(f"layer_types in {layer.where} has {len(kinds)} entries for {num_layers} layers")
    if "sliding_attention" not in kinds:
        return ()
    window = layer.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _output_rows(source: _Source) -> tuple[int | None, bool]:
    """Rows of the head's own lm_head, None where the target's is meant, and whether its embedding is both."""
    head, target = source.head, source.target
    wanted = head.optional_size("draft_vocab_size")
    if source.has("lm_head.weight"):
        rows = source.tensors.rows("lm_head.weight")
        assert rows is not None, "the tensor is there"
        if wanted is not None and wanted != rows:
            raise StartupError(
                f"draft_vocab_size in {head.where} is {wanted}, but lm_head.weight has {rows} rows"
            )
        if rows > target.vocab_size:
            raise ModelNotSupported(
                f"{source.tensors.what} scores {rows} tokens, but the target has {target.vocab_size}: it was "
                "trained for another vocabulary"
            )
        return rows, False
    if wanted is not None and wanted != target.vocab_size:
        return wanted, False  # Its lm_head.weight will be missed by name.
    ties = head.flag("tie_word_embeddings", default=source.layer.flag("tie_word_embeddings"))
    if ties and source.has("embed_tokens.weight") and not target.ties_embeddings:
        return None, True
    return None, ties and head.flag("embed_requires_grad") and source.has("embed_tokens.weight")


def _check_widths(source: _Source, *, needs_same: bool) -> None:
    """Refuses a head for another target.

    Args:
        source: The head.
        needs_same: Whether it uses the target's embedding or lm_head, so that its width must be the target's.
    """
    target, width = source.target, source.layer.size("hidden_size")
    reads = source.head.size("target_hidden_size", width)
    if reads != target.hidden_size:
        raise ModelNotSupported(
            f"{source.tensors.what} reads hidden states of width {reads}, but the target's are "
            f"{target.hidden_size} wide: it was trained for another model"
        )
    if needs_same and width != reads:
        raise ModelNotSupported(
            f"{source.tensors.what} is {width} wide and brings no embedding and lm_head of its own; those of "
            f"the target are {reads} wide"
        )
    vocab_size = source.layer.size("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise ModelNotSupported(
            f"{source.tensors.what} is for a vocabulary of {vocab_size} tokens, but the target has "
            f"{target.vocab_size}: it was trained for another model"
        )
