"""Makes a module ready for the engine: probed, layers replaced, held against what it said before, packed.

What was done is written down as a Recipe, so that another start can do the same to a model without weights
and fill it from a file (`packed_cache`).
"""

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from engine.errors import ModelNotSupported, StartupError
from engine.model.attention.choice import choose_backend
from engine.model.attention.interface import probe_layers
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fusion import FusedPart, fuse_layers
from engine.model.kv_cache import LayerShape
from engine.model.packing import narrow_embeddings, pack_linear_layers
from engine.model.self_check import Trial, check_paged_logits, run_trial
from engine.model.weight_type import WeightPlan, unfit_weight


@dataclass(frozen=True, slots=True)
class Recipe:
    """What was done to a model.

    Attributes:
        layers: Cache shape of each attention layer.
        fused: Parts that were replaced by fewer operators.
        packed: Names of the linear layers that are packed, in that order.
        narrowed: Names of the embeddings that are held in 16 bits.
    """

    layers: tuple[LayerShape, ...]
    fused: tuple[FusedPart, ...] = ()
    packed: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()


def prepare(module: PreTrainedModel, plan: WeightPlan, operators: CpuOperators | None) -> Recipe:
    """Makes a module with weights ready, in place.

    Args:
        module: A model in evaluation mode, set to ATTENTION_NAME, on its device.
        plan: How its weights are to be held.
        operators: The C++ operators, for a float32 model on a CPU.

    Raises:
        ModelNotSupported: It cannot run on a paged KV cache.
        StartupError: A layer cannot be held as asked, or the model gives no numbers.
    """
    recipe = Recipe(probe(module))
    trial = run_trial(module)
    check_finite(module, trial)
    if operators is not None:
        recipe = replace(recipe, fused=fuse_layers(module, operators))
    if trial is not None:
        check_paged_logits(module, recipe.layers, choose_backend(operators, module.device), trial)
    if plan.packer is None:
        return recipe
    packed = pack_linear_layers(module, plan.packer, strict=plan.strict)
    return replace(recipe, packed=packed, narrowed=narrow_embeddings(module))


def check_finite(module: PreTrainedModel, trial: Trial | None) -> None:
    """Refuses a model whose trial gave no numbers.

    Raises:
        StartupError: It names a weight that is to blame, if there is one in memory.
    """
    if trial is not None and not bool(trial.logits.isfinite().all()):
        raise not_finite(module, unfit_weight(module))


def not_finite(module: PreTrainedModel, weight: str | None) -> StartupError:
    """What is said of a model that gives no numbers, and of the weight that is to blame."""
    reason = (
        "" if weight is None else f": {weight} has weights that are not finite, so the checkpoint is damaged"
    )
    return StartupError(f"{type(module).__name__} gives logits that are not finite{reason}")


def probe(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """The cache shape of each attention layer.

    Raises:
        ModelNotSupported: It cannot run on a paged KV cache.
    """
    try:
        return probe_layers(module)
    except TypeError as error:
        raise ModelNotSupported(
            f"{type(module).__name__} does not hand its caller's arguments on to attention ({error}), so "
            "attention cannot be told of the paged cache; choose a model of another architecture"
        ) from error
