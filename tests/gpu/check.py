"""Checks and times everything that needs a real GPU; takes less than ten minutes.

    python -m tests.gpu.check [--device cuda] [--out gpu-check.json]

First that kernels, models and heads on them agree with the reference, then the bandwidth of copies, then an
8B-shaped target with random weights and a 1B-shaped draft whose acceptance follows a script: tokens a second
without speculation, with chains and with trees, beside the limit that the memory sets. The exit status is 1
if anything disagrees or an answer is wrong; speed alone fails nothing. With `--device cpu --tiny` the same
runs in seconds and its times mean nothing: Triton's interpreter stands in for the GPU.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch


def main(arguments: list[str] | None = None) -> int:
    """Runs everything, prints the tables and writes the file; the exit status."""
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    # Only now: Triton reads the variable when it is imported.
    from tests.gpu.agreement import kernel_findings, logits_findings
    from tests.gpu.eight_bits import eight_bit_findings
    from tests.gpu.heads import head_findings, medusa_findings
    from tests.gpu.quantized import quantized_findings
    from tests.gpu.sampling import sampling_findings
    from tests.gpu.speed import TINY_PLAN, Plan, copy_bandwidth, speeds

    began = time.perf_counter()
    findings = [
        *kernel_findings(device, tiny=options.tiny),
        *logits_findings(device, tiny=options.tiny),
        *([] if options.tiny else [*head_findings(device), *medusa_findings(device)]),
        *([] if options.tiny else sampling_findings(device)),
        *([] if options.tiny else [*eight_bit_findings(device), *quantized_findings(device)]),
    ]
    faulty = [finding for finding in findings if finding.fault]
    say(f"{len(findings) - len(faulty)} of {len(findings)} comparisons agree")
    for finding in faulty:
        say(f"  {finding.name}: {finding.fault}")
    plan = TINY_PLAN if options.tiny else Plan()
    bandwidth = copy_bandwidth(plan.copy_bytes, device)
    say(f"copies: {bandwidth / 1e9:.0f} GB/s\n")
    say("batch  method  tokens/s  tokens/step  of the limit  x plain  right")
    timed = []
    for speed in speeds(plan, bandwidth, device):
        timed.append(speed)
        say(
            f"{speed.batch:5}  {speed.method:6}  {speed.tokens_per_second:8.1f}"
            f"  {speed.tokens_per_step:11.2f}  {speed.share_of_limit:12.2f}"
            f"  {speed.against_plain:7.2f}  {'yes' if speed.is_right else 'NO'}"
        )
    seconds = time.perf_counter() - began
    report = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": seconds,
        "findings": [asdict(finding) for finding in findings],
        "copy_bytes_per_second": bandwidth,
        "speeds": [asdict(speed) for speed in timed],
    }
    options.out.write_text(json.dumps(report, indent=2), "utf-8")
    say(f"\n{seconds:.0f} s; written to {options.out}")
    return int(bool(faulty) or not all(speed.is_right for speed in timed))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models and batches of a toy's size")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    return parser.parse_args(arguments)


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
