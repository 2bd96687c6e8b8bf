"""Hidden states that a pass is asked for: transformers' own, for every token of any batch, on every path."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import DType
from engine.errors import ModelNotSupported, StartupError
from engine.model.attention.choice import choose_backend
from engine.model.hidden_states import HiddenSelection, HiddenStateTap
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.layer_stack import LayerStack
from engine.model.model_runner import ModelRunner
from engine.token_tree import TokenTree
from tests.engines import load_own_tiny
from tests.operators import need_operators
from tests.tiny import tiny_model

LAYERS = 3
TOKENS = [5, 80, 13, 200, 31, 7, 99]
TREE = TokenTree((40, 41, 42), (0, 0, 1))
EVERYTHING = HiddenSelection((0, 1, 2), last=True)


def make_runner(arch: str, dtype: DType | None = None) -> ModelRunner:
    model = load_own_tiny(arch, dtype=dtype, **size(arch))
    cache = PagedKVCache(model.layers, 16, 4, model.dtype, model.device)
    return ModelRunner(model.module, cache, choose_backend(model.operators, model.device), model.vocab_size)


def size(arch: str) -> dict[str, Any]:
    return {"n_layer" if arch == "gpt2" else "num_hidden_layers": LAYERS}


def expected(module: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), 4 * hidden_size], as transformers gives them."""
    with torch.inference_mode():
        states = module(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == LAYERS + 1
    return torch.cat([state[0] for state in states], dim=-1)


def run_in_parts(runner: ModelRunner, tap: HiddenStateTap) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt in two chunks, the second with a tree and beside another sequence: features and logits."""
    first = SequenceSlice(TOKENS[:4], 0, [3, 9, 4], rows=0)
    head = runner.forward_tapped(runner.build([first]), tap)
    assert head.logits.shape[0] == 0
    second = SequenceSlice(TOKENS[4:], 4, [3, 9, 4], TREE, rows=4)
    other = SequenceSlice(TOKENS[:2], 0, [1], rows=1)
    tail = runner.forward_tapped(runner.build([other, second]), tap)
    return torch.cat([head.features, tail.features]), tail.logits


def reference(module: PreTrainedModel) -> torch.Tensor:
    """The same rows: the first chunk, the other sequence, the second chunk, each node behind its path."""
    prompt = expected(module, TOKENS)
    nodes = [expected(module, [*TOKENS, *TREE.path_tokens(node)])[-1:] for node in (1, 2, 3)]
    return torch.cat([prompt[:4], expected(module, TOKENS[:2]), prompt[4:], *nodes])


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss"])
def test_they_are_those_of_transformers(arch: str) -> None:
    runner = make_runner(arch)
    ours, _ = run_in_parts(runner, runner.tap(EVERYTHING))
    theirs = reference(tiny_model(arch, attention="eager", **size(arch)))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_the_last_layers_output_is_the_one_before_the_final_norm() -> None:
    runner = make_runner("llama")
    ours, _ = run_in_parts(runner, runner.tap(HiddenSelection((LAYERS,), last=True)))
    before, after = ours.chunk(2, dim=-1)
    module = tiny_model("llama", **size("llama"))
    norm = module.get_submodule("model.norm")
    assert torch.allclose(norm(before), after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-2)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mistral"])
def test_layers_that_are_one_operator_write_out_the_same_bits(arch: str) -> None:
    need_operators()
    runner = make_runner(arch, "int8")
    [stack] = [child for child in runner._module.modules() if isinstance(child, LayerStack)]
    selection = HiddenSelection((2, 0, LAYERS, 1), last=True)
    ours, logits = run_in_parts(runner, runner.tap(selection))
    [name] = [name for name, child in runner._module.named_modules() if child is stack]
    runner._module.set_submodule(name.rpartition(".")[0], stack.layers)
    theirs, their_logits = run_in_parts(runner, runner.tap(selection))
    assert torch.equal(ours, theirs)
    assert torch.equal(logits, their_logits)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_packed_weights_tell_nearly_the_same(dtype: DType) -> None:
    need_operators()
    runner = make_runner("llama", dtype)
    ours, _ = run_in_parts(runner, runner.tap(EVERYTHING))
    theirs = reference(tiny_model("llama", attention="eager", **size("llama")))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.99


def test_a_pass_that_is_not_asked_leaves_no_hook_and_says_the_same() -> None:
    runner = make_runner("llama")
    _, tapped = run_in_parts(runner, runner.tap(EVERYTHING))
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in runner._module.modules()), (
        "hooks outlive the pass"
    )
    runner.forward(runner.build([SequenceSlice(TOKENS[:4], 0, [3, 9, 4], rows=0)]))
    second = SequenceSlice(TOKENS[4:], 4, [3, 9, 4], TREE, rows=4)
    other = SequenceSlice(TOKENS[:2], 0, [1], rows=1)
    assert torch.equal(runner.forward(runner.build([other, second])), tapped)


def test_states_that_a_model_does_not_have_are_refused() -> None:
    runner = make_runner("llama")
    with pytest.raises(StartupError, match="hidden state 4 is wanted, but the model has 3 layers"):
        runner.tap(HiddenSelection((1, 4)))
    module = tiny_model("llama").base_model
    with pytest.raises(ModelNotSupported, match="keeps no base model"):
        HiddenStateTap(module, HiddenSelection(last=True))


def test_a_state_that_does_not_come_by_is_an_error() -> None:
    runner = make_runner("llama")
    stranger = tiny_model("llama", **size("llama"))
    with pytest.raises(RuntimeError, match="0 of 1 hidden states"):
        run_in_parts(runner, HiddenStateTap(stranger, HiddenSelection((1,))))
