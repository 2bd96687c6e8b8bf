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
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)

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
                f"tree: the widths {list(self.widths)} make {self.num_nodes} nodes, but a tree holds at "
                f"most {MAX_DRAFT_TOKENS}: each width counts the children of every node"
            )
        return self


class SequoiaTree(Tree):
    """The best shape for the acceptance by rank that is measured while serving (Chen et al. 2024)."""

    shape: Literal["sequoia"] = "sequoia"
    max_nodes: Nodes = 16
    max_depth: Nodes = 8

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        return self.max_nodes

    @property
    def branches(self) -> bool:
        """It may."""
        return self.max_nodes > 1


class DynamicTree(Tree):
    """The nodes that the draft model finds likeliest (EAGLE-2, Li et al. 2024)."""

    shape: Literal["dynamic"] = "dynamic"
    max_nodes: Nodes = 16
    max_depth: Nodes = 6
    top_k: Nodes = 4

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        return self.max_nodes

    @property
    def branches(self) -> bool:
        """It may."""
        return self.max_nodes > 1

    @property
    def selects(self) -> bool:
        """A node's token decides whether it is kept."""
        return True


TreeConfig = Annotated[StaticTree | SequoiaTree | DynamicTree, Field(discriminator="shape")]


def read_tree(value: object) -> object:
    """The short forms of a tree, as files, variables and flags hold them, in their long form."""
    if isinstance(value, str):
        try:
            parsed: object = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"must be widths, a shape or a mapping, got {value!r}") from error
        if isinstance(parsed, str) and re.fullmatch(r"\d+(\s*,\s*\d+)*", parsed):
            parsed = parsed.split(",")
        value = parsed
    if isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple):
        return {"shape": "static", "widths": value}
    if isinstance(value, str):
        return {"shape": value}
    return value
