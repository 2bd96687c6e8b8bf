"""The operators' threads: whoever helps, a result is the same, and nobody is waited for."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.model.int8 import Int8Linear
from engine.model.threads import OperatorThreads
from tests.operators import need_operators

# A fork takes no threads along: a job that waited for those of the parent would never end.
FORKED = """
import os, sys, torch
from tests.operators import need_operators
from engine.model.int8 import Int8Linear
operators = need_operators()
torch.manual_seed(0)
layer, x = Int8Linear(torch.randn(512, 256), None, operators), torch.randn(20, 256)
operators.use_threads(2)
expected = layer(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), expected) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def layer_and_rows() -> tuple[Int8Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 256, generator=generator)
    return Int8Linear(weight, None, need_operators()), torch.randn(40, 256, generator=generator)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_results_are_the_same_with_any_number(threads: int) -> None:
    operators = need_operators()
    layer, rows = layer_and_rows()
    operators.use_threads(1)
    expected = layer(rows)
    try:
        operators.use_threads(threads)
        assert all(torch.equal(layer(rows), expected) for _ in range(50))
    finally:
        operators.use_threads(0)


def test_jobs_of_several_threads_do_not_mix() -> None:
    layer, rows = layer_and_rows()
    operators = need_operators()
    expected = [layer(rows[: 8 * count]) for count in range(1, 6)]

    def work(count: int) -> bool:
        operators.use_threads(3)
        return all(torch.equal(layer(rows[: 8 * count]), expected[count - 1]) for _ in range(100))

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(work, range(1, 6)))


def test_a_job_waits_for_nobody_who_does_not_come() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_torch_keeps_to_one_thread_meanwhile() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with OperatorThreads.for_weights("int8", need_operators()):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with OperatorThreads.for_weights("float16", need_operators()):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
