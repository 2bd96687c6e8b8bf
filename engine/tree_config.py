"""Settings of draft trees, with their short forms."""

import re
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


def read_tree(value: object) -> object:
    """The short forms of a tree, as files, variables and flags hold them, in their long form.

    Raises:
        ValueError: It is none of them; the message goes on from "must".
    """
    tree = _parsed(value) if isinstance(value, str) else value
    match tree:
        case None | Tree() | {"shape": "static" | "sequoia" | "dynamic"}:
            return tree
        case "sequoia" | "dynamic":
            return {"shape": tree}
        case bool():
            pass
        case int():
            return {"shape": "static", "widths": [tree]}
        case list() | tuple():
            return {"shape": "static", "widths": tree}
    raise ValueError(
        "be widths such as 3,2,1,1, or sequoia, dynamic, or a mapping whose shape is one of these"
    )


def _parsed(text: str) -> object:
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text.strip()):
        return [int(width) for width in text.split(",")]
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
