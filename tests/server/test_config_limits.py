"""The largest values of settings that would otherwise overflow where they are used."""

import pytest

from server.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("kv_cache_gb", 1 << 20),
        ("max_body_mb", 1 << 20),
        ("max_stored_mb", 1 << 20),
        ("step_timeout_seconds", 31536000),
        ("shutdown_grace_seconds", 31536000),
        ("suffix_factor", 256),
    ],
)
def test_sizes_and_times_have_ends_before_those_of_numbers_and_clocks(name: str, largest: int) -> None:
    method: dict[str, object] = {"speculation": "suffix"}
    load_config({name: str(largest)} | method, {})
    for value in ("9" * 300, str(largest + 1)):
        with pytest.raises(ConfigError, match=f"{name} must be less than or equal to {largest}, got '"):
            load_config({name: value} | method, {})
