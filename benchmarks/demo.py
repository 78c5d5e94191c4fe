"""`make demo`: the four commands on data/ with the embedded target, then one table of what came out.

Run again it continues or reuses what is in runs/demo; remove that folder to start afresh.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/demo.toml"
DATA = "data/chat_openai.jsonl"  # half of data/, for the time it takes
PROMPTS = "data/eval_prompts.jsonl"
RUN = ROOT / "runs" / "demo"


def sfdd(command: str, *arguments: str) -> dict[str, Any]:
    """Run one command as a user would, progress and all; its result as JSON."""
    words = [command, *arguments, "--config", CONFIG]
    print(f"\n$ sfdd {' '.join(words)}", file=sys.stderr, flush=True)
    sfdd_command = [str(Path(sys.executable).with_name("sfdd")), *words, "--json"]
    done = subprocess.run(sfdd_command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def evaluate() -> dict[str, Any]:
    """Measure the drafter, unless it has been measured since it was trained."""
    report = RUN / "eval.json"
    made_from = [RUN / "drafter" / "model.safetensors", ROOT / CONFIG, ROOT / PROMPTS]
    if report.exists() and report.stat().st_mtime > max(p.stat().st_mtime for p in made_from):
        print(f"\n{report.relative_to(ROOT)} is up to date", file=sys.stderr)
        earlier: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return earlier
    return sfdd("eval", PROMPTS)


def table(
    score: dict[str, Any], kept: dict[str, Any], train: dict[str, Any], measured: dict[str, Any]
) -> str:
    """One line per figure."""
    before, after = train["held_out_before"], train["held_out_after"]
    rows = [
        (
            "conversations",
            f"{score['read']} read = {score['scored']} scored + {score['skipped']} skipped",
        ),
        (
            "kept",
            f"{kept['kept']} of {kept['scored']} (flatness >= {kept['threshold']:.5f}), "
            f"{kept['supervised_tokens_kept']:,} of {kept['supervised_tokens_scored']:,} "
            "supervised tokens",
        ),
        ("training loss", f"{train['first_loss']:.3f} -> {train['last_loss']:.3f}"),
        (
            "held-out top-1 agreement",
            f"{before['top1_agreement']:.1%} -> {after['top1_agreement']:.1%}",
        ),
        ("", f"{'trained':>10}{'untrained':>12}"),
    ]
    for name, key, form in (
        ("acceptance length tau", "acceptance_length", ".2f"),
        ("mean accepted tokens l", "mean_accepted", ".2f"),
        ("tokens/s with drafter", "tokens_per_second", ".1f"),
        ("speedup", "speedup", ".2f"),
    ):
        trained, untrained = (measured[drafter][key] for drafter in ("drafter", "untrained"))
        rows.append((name, f"{trained:>10{form}}{untrained:>12{form}}"))
    prompts = measured["num_prompts"]
    same = [f"{measured[name]['num_identical']}/{prompts}" for name in ("drafter", "untrained")]
    rows += [
        ("same output as without", f"{same[0]:>10}{same[1]:>12}"),
        ("tokens/s without drafter", f"{measured['baseline']['tokens_per_second']:>10.1f}"),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def main() -> None:
    started = time.monotonic()
    score = sfdd("score", DATA)
    kept = sfdd("filter")
    train = sfdd("train-draft")
    measured = evaluate()
    print(f"\nSmolLM2-135M-Instruct on {DATA}, {(time.monotonic() - started) / 60:.1f} minutes\n")
    print(table(score, kept, train, measured))


if __name__ == "__main__":
    main()
