"""What is half of the data worth? Full set, flattest half and random half, for EAGLE and EAGLE-3.

    python benchmarks/study.py DIR --data CHATS.jsonl ... --prompts PROMPTS.jsonl ...

Scores the first conversations of every file; per method and selection, in a run directory of its own,
`sfdd filter`, `sfdd train-draft` and `sfdd eval`; then prints a table. `first epoch` is the full set read
once, with a learning rate that falls to zero in it. Equal seeds, one cache of hidden states. Run again it
goes on, and reuses what is in DIR.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from commands import sfdd, up_to_date

# EAGLE-3 first: the cache it makes also serves EAGLE, which reads one layer of it.
METHODS: Mapping[str, Sequence[object]] = {
    "eagle3": ["--ttt-steps", 4, "--draft-vocab-size", 8000],
    "eagle": [],
}
EPOCHS = 3
FULL, FIRST_EPOCH = "full", "first epoch"
SELECTIONS: Mapping[str, Sequence[object]] = {
    FULL: ["--keep", 1],
    "flattest half": ["--keep", 0.5],
    "random half": ["--keep", 0.5, "--metric", "random"],
    "flattest half of each source": ["--keep", 0.5, "--by", "source"],
    FIRST_EPOCH: ["--keep", 1],
}
TRAINING: Sequence[object] = ["--batch-tokens", 1024, "--max-length", 512, "--held-out", 0.02]
DRAFTING: Sequence[object] = ["--num-speculative-tokens", 3, "--max-new-tokens", 64]


@dataclass(frozen=True)
class Arm:
    """One drafter of the study: how it was trained, what it is worth."""

    method: str
    selection: str
    trained: Mapping[str, Any]
    measured: Mapping[str, Any]


def score(options: argparse.Namespace) -> None:
    """Score the first conversations of every file, as files of the same names."""
    files = []
    for source in options.data:
        files.append(options.dir / "data" / source.name)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        with source.open(encoding="utf-8") as lines:
            first = "".join(islice(lines, options.conversations))
        if not files[-1].exists() or files[-1].read_text(encoding="utf-8") != first:
            files[-1].write_text(first, encoding="utf-8")
    sfdd("score", *files, "--target", options.target, "--run", options.dir)


def run_arm(options: argparse.Namespace, method: str, selection: str) -> Arm:
    """Select, train and measure, or take up what is there."""
    run = options.dir / f"{method}-{selection.replace(' ', '-')}"
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    command = partial(sfdd, env={"OMP_NUM_THREADS": str(threads)})
    command(
        *["filter", "--run", run, "--scores", options.dir / "scores.parquet"],
        *SELECTIONS[selection],
    )
    trained = command(
        *["train-draft", "--run", run, "--cache", options.dir / "states", "--tracker", "none"],
        *["--method", method, *METHODS[method], *TRAINING],
        *["--epochs", 1 if selection == FIRST_EPOCH else EPOCHS],
    )
    made_from = [run / "drafter" / "model.safetensors", *options.prompts]
    measured = up_to_date(run / "eval.json", made_from) or command(
        *["eval", *options.prompts, "--run", run, "--limit", options.limit, *DRAFTING],
        *(["--untrained"] if selection == FULL else []),
    )
    return Arm(method, selection, trained, measured)


def table(arms: Sequence[Arm]) -> str:
    """Markdown: one row per drafter, the untrained ones from the evaluation of the full set."""
    sets = list(arms[0].measured["sets"])
    about = ["method", "trained on", "conversations", "tokens", "min", "held-out tau"]
    rows = [[*about, *sets, "all"]]
    rows.append(["---"] * len(rows[0]))
    for arm in arms:
        before, after = (arm.trained[f"held_out_{when}"] for when in ("before", "after"))
        if arm.selection == FULL:
            tau = f"{before['acceptance_length']:.2f}"
            rows.append([arm.method, "nothing", "", "", "", tau, *_cells(arm, "untrained")])
        epoch = arm.trained["supervised_tokens"] // arm.trained["epochs"]
        minutes, tau = arm.trained["seconds"] / 60, f"{after['acceptance_length']:.2f}"
        about = [f"{arm.trained['conversations']:,}", f"{epoch:,}", f"{minutes:.1f}", tau]
        rows.append([arm.method, arm.selection, *about, *_cells(arm, "drafter")])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(arm: Arm, drafter: str) -> list[str]:
    """tau, l and speedup on each prompt set, and on all."""
    found = [of_set[drafter] for of_set in (*arm.measured["sets"].values(), arm.measured)]
    keys = ("acceptance_length", "mean_accepted", "speedup")
    return [" / ".join(f"{of_drafter[key]:.2f}" for key in keys) for of_drafter in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dir", type=Path, help="where everything goes")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="for sfdd eval")
    parser.add_argument("--conversations", type=int, default=260, help="of each file")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--jobs", type=int, default=2, help="drafters at a time, sharing the cores")
    parser.add_argument("--selections", nargs="+", choices=SELECTIONS, default=list(SELECTIONS))
    options = parser.parse_args()
    options.dir = options.dir.resolve()
    options.prompts = [path.resolve() for path in options.prompts]
    score(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        names = product(METHODS, options.selections)
        arms = list(pool.map(lambda name: run_arm(options, *name), names))
    print(table(arms))


if __name__ == "__main__":
    main()
