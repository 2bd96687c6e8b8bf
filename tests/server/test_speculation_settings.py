"""What is said where settings of speculation cannot hold, or would do nothing."""

from typing import Any

import pytest

from engine.config import DraftModelSpeculation
from server.config import ConfigError, load_config

FORMS = "tree must be widths such as 3,2,1,1, or sequoia, dynamic, or a mapping with the shape static"
WIDTHS = "tree must have widths, the children of each node by depth, such as 3,2,1,1"
SIZES = "tree must have whole numbers from 1 to 63 as widths"


def error_of(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("x", FORMS),
        ("3;2", FORMS),
        ({}, FORMS),
        ({"shape": "oval"}, FORMS),
        ({"widths": [2]}, FORMS),
        ([], WIDTHS),
        ({"shape": "static"}, WIDTHS),
        ({"shape": "static", "widths": 3}, WIDTHS),
        (0, SIZES),
        ("0", SIZES),
        ([2, "x"], SIZES),
        ([2, True], SIZES),
        ([2.5], SIZES),
        ([64], SIZES),
        ("9,9,9", "tree must make at most 63 nodes, but the widths [9, 9, 9] make 819: each width counts"),
        (
            {"shape": "dynamic", "max_node": 3, "k": 2},
            "tree must not have max_node, k: a dynamic tree has shape, max_nodes, max_depth, top_k",
        ),
        (
            {"shape": "static", "max_nodes": 3, "widths": [2]},
            "tree must not have max_nodes: a static tree has shape, widths",
        ),
        ({"shape": "dynamic", "max_nodes": 0, "top_k": "many"}, "tree must have a whole number from 1 to 63"),
        ({"shape": "sequoia", "max_depth": True}, "tree must have a whole number from 1 to 63 as max_depth"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_in_one_line(tree: object, message: str) -> None:
    error = error_of(draft_model="d", tree=tree)
    assert error.startswith(f"--tree: {message}")
    assert error.endswith(f", got {tree!r}")
    assert "\n" not in error


@pytest.mark.parametrize("size", ["many", "0", 0, -1, "4.5", 4.5, [8]])
def test_a_draft_vocabulary_of_no_size_is_refused_in_one_line(size: object) -> None:
    error = error_of(draft_model="d", draft_vocab_size=size)
    assert error == (
        f"--draft-vocab-size: draft_vocab_size must be auto, all or a whole number from 1 on, got {size!r}"
    )


@pytest.mark.parametrize(("said", "size"), [("auto", "auto"), ("all", "all"), ("4096", 4096), (1, 1)])
def test_sizes_of_a_draft_vocabulary(said: object, size: object) -> None:
    speculation = load_config({"draft_model": "d", "draft_vocab_size": said}, {}).config.engine.speculation
    assert isinstance(speculation, DraftModelSpeculation)
    assert speculation.draft_vocab_size == size


@pytest.mark.parametrize(
    ("tree", "acceptance"), [("3,2", "block"), ("sequoia", "block"), ("dynamic", "rejection")]
)
def test_a_tree_that_the_rule_cannot_judge_names_both(tree: str, acceptance: str) -> None:
    error = error_of(draft_model="d", tree=tree, acceptance=acceptance)
    assert error.startswith(f"acceptance cannot be {acceptance}: {acceptance} ")
    assert error.endswith("(tree from --tree, acceptance from --acceptance)")


def test_several_drafts_that_the_rule_cannot_judge_are_named() -> None:
    error = error_of(draft_model="d", extra_draft_models="e", acceptance="rejection")
    assert error.endswith("(extra_draft_models from --extra-draft-models, acceptance from --acceptance)")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sibling_sampling": "with_replacement"}, "without a tree such as 3,2,1,1 there are no siblings"),
        (
            {"sibling_sampling": "with_replacement", "tree": "1,1"},
            "without a tree such as 3,2,1,1 there are no siblings",
        ),
        ({"sibling_sampling": "with_replacement", "tree": "dynamic"}, "rejection holds only for drafts of"),
        ({"sibling_sampling": "with_replacement", "extra_draft_models": "e"}, "rejection judges tokens by"),
    ],
)
def test_a_setting_without_effect_is_refused(flags: dict[str, Any], words: str) -> None:
    idle = next(iter(flags))
    error = error_of(draft_model="d", **flags)
    assert error.startswith(idle)
    assert words in error
    assert f"leave {idle} out" in error
    assert "\n" not in error


@pytest.mark.parametrize("name", ["suffix_max_cached_requests", "suffix_max_cached_tokens"])
def test_a_memory_that_nobody_fills_is_refused(name: str) -> None:
    assert error_of(speculation="suffix", **{name: "9"}).startswith(
        f"{name} has no effect without suffix_share: set that or leave {name} out"
    )
    load_config({"speculation": "suffix", "suffix_share": "on", name: "9"}, {})


@pytest.mark.parametrize(
    "flags",
    [
        {"sibling_sampling": "with_replacement", "tree": "3,2"},
        {"sibling_sampling": "with_replacement", "tree": "sequoia", "acceptance": "rejection"},
        {"draft_sampling": "greedy", "tree": "dynamic"},
        # A request may ask for match, and then it is drafted for that way.
        {"draft_sampling": "greedy", "acceptance": "rejection"},
        # The defaults, spelled out, promise nothing.
        {"sibling_sampling": "without_replacement", "draft_sampling": "coupled", "acceptance": "block"},
    ],
)
def test_a_setting_with_effect_is_taken(flags: dict[str, Any]) -> None:
    speculation = load_config({"draft_model": "d", **flags}, {}).config.engine.speculation
    assert speculation.method == "draft_model"


@pytest.mark.parametrize("name", ["tree", "extra_draft_models", "sibling_sampling", "suffix_tree"])
def test_a_setting_of_another_method_is_refused(name: str) -> None:
    others = {"suffix_tree": "suffix", "extra_draft_models": "draft_model"}
    other = others.get(name, "draft_model or eagle or medusa")
    assert error_of(speculation="ngram", **{name: "1"}) == (
        f"--{name.replace('_', '-')}: {name} is for {other}, but speculation is ngram (--speculation)"
    )
