"""Decoding on this machine's processor: the cpu backend in each weight format, against others on the same model file.

Hugging Face `generate` in bf16 is the yardstick; llama.cpp joins if it is installed (`pip install '.[bench]'`, or
--llama-python). Each runs in a process of its own, in turn, on the same number of threads. Prints a table, what was
aimed for, and one JSON line; with --strict, exit code 1 where an aim was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("fp16", "bf16", "int8", "int4", "fp32")
DEFAULT_FORMAT = "fp16"
WORKERS = Path(__file__).with_name("cpu_workers.py")


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound and what was measured. Optional aims do not fail a strict run."""

    name: str
    measured: float
    bound: float
    at_most: bool = False
    optional: bool = False

    @property
    def met(self) -> bool:
        """Whether the measurement keeps the bound."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


Measured = dict[str, float]


def run_worker(python: str, name: str, arguments: dict[str, object]) -> Measured | None:
    """Return what a worker measured, None (and why, on stderr) if it could not."""
    command = [python, str(WORKERS), name, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print(f"{name} {arguments.get('weight_format', '')}: not measured: {reason}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Measured]:
    """Return the measurements by name, those that could be made."""
    common = {"threads": options.threads, "tokens": options.tokens, "repeats": options.repeats}
    shared = {"model": str(options.model), **common}
    rows = {"hugging face bf16": run_worker(sys.executable, "hugging_face", shared)}
    rows["llama.cpp"] = run_worker(options.llama_python, "llama_cpp", shared) if options.model.is_file() else None
    for weight_format in options.formats:
        arguments = {**shared, "weight_format": weight_format}
        rows[f"megakernel {weight_format}"] = run_worker(sys.executable, "megakernel", arguments)
    return {name: row for name, row in rows.items() if row is not None}


def aims(rows: dict[str, Measured]) -> list[Aim]:
    """Return the bounds that the measured rows can be held to."""
    found: list[Aim] = []
    default, int4 = rows.get(f"megakernel {DEFAULT_FORMAT}"), rows.get("megakernel int4")
    if default and (theirs := rows.get("hugging face bf16")):
        speed = theirs["step_ms_1"] / default["step_ms_1"]
        found.append(Aim("default format, batch 1, against Hugging Face bf16 (times as fast)", speed, 1.5))
    if default:
        gain = 8 * default["step_ms_1"] / default["step_ms_8"]
        found.append(Aim("default format, 8 sequences against 1 (times the tokens/s)", gain, 5.0))
        found.append(
            Aim("default format, resident memory (MiB)", default["resident_mib"], 1600 * 1e6 / 2**20, at_most=True)
        )
    if int4 and (theirs := rows.get("llama.cpp")):
        share = theirs["step_ms_1"] / int4["step_ms_1"]
        found.append(Aim("int4, batch 1, against llama.cpp (times as fast)", share, 0.6, optional=True))
    return found


def show(rows: dict[str, Measured], found: list[Aim]) -> None:
    """Print the tables."""
    print(f"{'':20} {'ms/token':>9} {'tokens/s':>9} {'8 seq. tokens/s':>16} {'prefill tokens/s':>17} {'resident':>10}")
    for name, row in rows.items():
        eight = f"{8e3 / row['step_ms_8']:>16.0f}" if "step_ms_8" in row else " " * 16
        prefill = f"{row['prefill_tokens_per_s']:>17.0f}" if "prefill_tokens_per_s" in row else " " * 17
        one = row["step_ms_1"]
        print(f"{name:20} {one:>9.2f} {1e3 / one:>9.1f} {eight} {prefill} {row['resident_mib']:>6.0f} MiB")
    print()
    for aim in found:
        verdict = "met" if aim.met else "missed"
        print(f"{aim.name}: {aim.measured:.2f}, aim {'<=' if aim.at_most else '>='} {aim.bound:.6g}: {verdict}")
    print()


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_model(), help="a .gguf file or Hugging Face directory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="decoded per measurement")
    parser.add_argument("--repeats", type=int, default=3, help="the best is reported")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--llama-python", default=sys.executable, help="the Python that llama_cpp is installed for")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where an aim was missed")
    options = parser.parse_args()
    rows = measure(options)
    found = aims(rows)
    show(rows, found)
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    told = [{"name": aim.name, "measured": aim.measured, "bound": aim.bound, "met": aim.met} for aim in found]
    setting = {"threads": options.threads, "tokens": options.tokens, "model": options.model.name}
    print(json.dumps({"benchmark": "cpu", "rows": rows, "aims": told, "machine": machine, **setting}))
    missed = [aim for aim in found if not aim.met and not aim.optional]
    return 1 if options.strict and missed else 0


def default_model() -> Path:
    """Return the default model's file, where `megakernel pull` puts it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"
    return cache / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"


if __name__ == "__main__":
    sys.exit(main())
