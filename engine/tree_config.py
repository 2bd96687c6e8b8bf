"""Settings of draft trees, with their short forms."""

import re
from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.sampling_params import MAX_DRAFT_TOKENS

Nodes = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]


class Tree(BaseModel):
    """What all trees have in common: immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def selects(self) -> bool:
        """Whether which nodes there are depends on their tokens."""
        return False


class StaticTree(Tree):
    """Every node at a depth has the same number of children (SpecInfer, Miao et al. 2023).

    The widths 3, 2, 1 are 3 nodes below the root, 2 below each of those, 1 below each of those: 3 + 6 + 6.
    """

    shape: Literal["static"] = "static"
    widths: tuple[Annotated[int, Field(ge=1, strict=True)], ...] = Field(min_length=1)

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        return sum(accumulate(self.widths, mul))

    @property
    def branches(self) -> bool:
        """Whether it is more than a chain."""
        return max(self.widths) > 1

    @model_validator(mode="after")
    def _small_enough(self) -> Self:
        if self.num_nodes > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"make at most {MAX_DRAFT_TOKENS} nodes, but the widths {list(self.widths)} make "
                f"{self.num_nodes}: each width counts the children of every node at its depth"
            )
        return self


class BoundedTree(Tree):
    """A tree of a given size, whatever its shape."""

    max_nodes: Nodes = 16

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        return self.max_nodes

    @property
    def branches(self) -> bool:
        """It may."""
        return self.max_nodes > 1


class SequoiaTree(BoundedTree):
    """The best shape for the acceptance by rank that is measured while serving (Chen et al. 2024)."""

    shape: Literal["sequoia"] = "sequoia"
    max_depth: Nodes = 8


class DynamicTree(BoundedTree):
    """The nodes that the draft model finds likeliest (EAGLE-2, Li et al. 2024)."""

    shape: Literal["dynamic"] = "dynamic"
    max_depth: Nodes = 6
    top_k: Nodes = 4

    @property
    def selects(self) -> bool:
        """A node's token decides whether it is kept."""
        return True


TreeConfig = Annotated[StaticTree | SequoiaTree | DynamicTree, Field(discriminator="shape")]


KINDS: dict[str, type[Tree]] = {"static": StaticTree, "sequoia": SequoiaTree, "dynamic": DynamicTree}


def read_tree(value: object) -> object:
    """The short forms of a tree, as files, variables and flags hold them, in their long form.

    Raises:
        ValueError: It is none of them, or its settings do not hold; the message goes on from "must".
    """
    tree = _parsed(value) if isinstance(value, str) else value
    match tree:
        case None | Tree():
            return tree
        case "sequoia" | "dynamic":
            return {"shape": tree}
        case bool():
            pass
        case int():
            return _checked({"shape": "static", "widths": [tree]})
        case list() | tuple():
            return _checked({"shape": "static", "widths": tree})
        case Mapping() if str(tree.get("shape")) in KINDS:
            return _checked(tree)
    raise ValueError(
        "be widths such as 3,2,1,1, or sequoia, dynamic, or a mapping with the shape static, sequoia or "
        "dynamic"
    )


def _checked(tree: Mapping[object, object]) -> Mapping[object, object]:
    """A tree in its long form; refuses in one sentence what pydantic would in several of its own."""
    shape = str(tree["shape"])
    known = [name for name in KINDS[shape].model_fields if name != "shape"]
    unknown = [str(key) for key in tree if key not in ("shape", *known)]
    if unknown:
        raise ValueError(f"not have {', '.join(unknown)}: a {shape} tree has shape, {', '.join(known)}")
    for name in known:
        if name == "widths":
            _check_widths(tree.get(name))
        elif name in tree and not _is_size(tree[name]):
            raise ValueError(f"have a whole number from 1 to {MAX_DRAFT_TOKENS} as {name}")
    return tree


def _check_widths(widths: object) -> None:
    if not isinstance(widths, list | tuple) or not widths:
        raise ValueError("have widths, the children of each node by depth, such as 3,2,1,1")
    if not all(map(_is_size, widths)):
        raise ValueError(f"have whole numbers from 1 to {MAX_DRAFT_TOKENS} as widths")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DRAFT_TOKENS


def _parsed(text: str) -> object:
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text.strip()):
        return [int(width) for width in text.split(",")]
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
