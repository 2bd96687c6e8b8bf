from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import StartupError
from engine.model import memory
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.memory import GIB, CacheFootprint, available_bytes, linux_available_bytes, plan_blocks

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 8, 8), LayerShape(3, 8, 4))
# (2 * 16 + 3 * 12) numbers of 4 bytes per token, 16 tokens per block
PER_BLOCK = 68 * 4 * 16
FOOTPRINT = CacheFootprint(LAYERS, torch.float32)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000 * PER_BLOCK)
    return monkeypatch


def plan(
    config: CacheConfig | None = None,
    *,
    seqs: int = 32,
    max_model_len: int = 512,
    caches: tuple[CacheFootprint, ...] = (FOOTPRINT,),
) -> memory.BlockPlan:
    scheduler = SchedulerConfig(max_num_seqs=seqs)
    return plan_blocks(config or CacheConfig(), scheduler, caches, max_model_len, CPU)


def test_a_block_is_as_large_as_the_cache_makes_it(free: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(LAYERS, 7, 16, torch.float32, CPU)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*cache.keys, *cache.values))
    assert plan(CacheConfig(num_kv_blocks=100)).bytes_per_block * 7 == held


def test_half_of_the_free_memory_on_a_cpu(free: pytest.MonkeyPatch) -> None:
    result = plan()
    assert result.num_blocks == 500
    assert result.total_bytes == 500 * PER_BLOCK
    assert "50%" in result.reason


def test_what_graphs_will_take_is_left_alone(free: pytest.MonkeyPatch) -> None:
    def with_graphs(config: CacheConfig) -> memory.BlockPlan:
        return plan_blocks(config, SchedulerConfig(), (FOOTPRINT,), 512, CPU, 200 * PER_BLOCK)

    result = with_graphs(CacheConfig())
    assert result.num_blocks == 400
    assert "beside 0.00 GiB for graphs" in result.reason
    assert with_graphs(CacheConfig(num_kv_blocks=800)).num_blocks == 800
    with pytest.raises(StartupError, match=r"801 blocks .* free on cpu beside .* GiB for graphs; lower"):
        with_graphs(CacheConfig(num_kv_blocks=801))


def test_the_draft_cache_counts_in_its_own_type(free: pytest.MonkeyPatch) -> None:
    result = plan(caches=(FOOTPRINT, CacheFootprint(LAYERS, torch.bfloat16)))
    assert result.bytes_per_block == PER_BLOCK * 3 // 2
    assert result.num_blocks == 333


def test_what_is_kept_once_per_block_counts_too(free: pytest.MonkeyPatch) -> None:
    result = plan(caches=(FOOTPRINT, CacheFootprint((), torch.bfloat16, extra_bytes_per_block=200)))
    assert result.bytes_per_block == PER_BLOCK + 200


def test_no_more_than_all_sequences_can_fill(free: pytest.MonkeyPatch) -> None:
    # 500 tokens are 31.25 blocks, so 32.
    result = plan(seqs=3, max_model_len=500)
    assert result.num_blocks == 96
    assert "max_num_seqs = 3" in result.reason
    assert "less than 50% of the" in result.reason


def test_a_size_that_is_capped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 * GIB)
    result = plan(CacheConfig(kv_cache_gb=2), seqs=3, max_model_len=500)
    assert result.num_blocks == 96
    assert result.reason == (
        "all that max_num_seqs = 3 sequences of 500 tokens can fill, less than kv_cache_gb = 2"
    )


def test_a_size_over_what_is_free_is_refused_even_if_it_could_never_be_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 22 * GIB)
    with pytest.raises(
        StartupError, match=r"kv_cache_gb = 1000\).* 1000.00 GiB, but only 22.00 GiB are free"
    ):
        plan(CacheConfig(kv_cache_gb=1000), seqs=3, max_model_len=500)


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (CacheConfig(kv_cache_gb=1e-9), "; give the pool more with kv_cache_gb"),
        (CacheConfig(num_kv_blocks=1, block_size=1), "; give the pool more with num_kv_blocks"),
        (
            CacheConfig(num_kv_blocks=2, block_size=1),
            "; set max_model_len to at most 2, or give the pool more with num_kv_blocks",
        ),
    ],
)
def test_no_context_is_advised_that_holds_nothing(
    config: CacheConfig, advice: str, free: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError) as refusal:
        plan(config)
    assert str(refusal.value).endswith(advice)


def test_kv_cache_gb_sets_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: GIB)
    assert plan(CacheConfig(kv_cache_gb=0.004)).num_blocks == int(0.004 * GIB) // PER_BLOCK


def test_num_kv_blocks_is_taken_as_it_is(free: pytest.MonkeyPatch) -> None:
    assert plan(CacheConfig(num_kv_blocks=40), seqs=1, max_model_len=16).num_blocks == 40


def test_one_sequence_that_does_not_fit_is_refused_with_figures(free: pytest.MonkeyPatch) -> None:
    plan(CacheConfig(num_kv_blocks=32), max_model_len=512)
    with pytest.raises(StartupError, match=r"31 blocks of 16.*needs 32.*max_model_len to at most 496"):
        plan(CacheConfig(num_kv_blocks=31), max_model_len=512)
    with pytest.raises(StartupError, match=r"50% of the .* free"):
        plan(max_model_len=501 * 16)


@pytest.mark.parametrize("config", [CacheConfig(num_kv_blocks=1001), CacheConfig(kv_cache_gb=1)])
def test_more_than_is_free_is_refused(config: CacheConfig, free: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="GiB are free on cpu; lower kv_cache_gb or num_kv_blocks"):
        plan(config, seqs=128)


def test_the_real_machine_has_memory() -> None:
    assert 0 < available_bytes(CPU) < 1 << 50


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   100 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 102400),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 102400),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "3000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 700\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "3000\n",
            },
            2700,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n2:memory,hugetlb:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 50\ninactive_file 9\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
            },
            3050,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            0,
        ),
    ],
    ids=["no groups", "unlimited", "v2, limit above", "v1", "used up"],
)
def test_control_groups_limit_what_is_free(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert linux_available_bytes(machine(tmp_path, files)) == expected


def test_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../outside\n",
        "sys/fs/cgroup/memory.max": "4000\n",
        "sys/fs/cgroup/memory.current": "1000\n",
    }
    assert linux_available_bytes(machine(tmp_path, files)) == 3000
