"""`make demo`: the four commands on data/ with the embedded target, then one table of what came out.

Run again it continues or reuses what is in runs/demo; remove that folder to start afresh.
"""

import time
from typing import Any

from commands import ROOT, sfdd, up_to_date

CONFIG = "configs/demo.toml"
DATA = "data/chat_openai.jsonl"  # half of data/, for the time it takes
PROMPTS = "data/eval_prompts.jsonl"
RUN = ROOT / "runs" / "demo"


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
    configured = ("--config", CONFIG)
    score = sfdd("score", DATA, *configured)
    kept = sfdd("filter", *configured)
    train = sfdd("train-draft", *configured)
    made_from = [RUN / "drafter" / "model.safetensors", ROOT / CONFIG, ROOT / PROMPTS]
    measured = up_to_date(RUN / "eval.json", made_from) or sfdd("eval", PROMPTS, *configured)
    print(f"\nSmolLM2-135M-Instruct on {DATA}, {(time.monotonic() - started) / 60:.1f} minutes\n")
    print(table(score, kept, train, measured))


if __name__ == "__main__":
    main()
