"""How close `sfdd train-draft` comes to a bare loop: tokens/s and peak memory, both in one run.

The *bare loop* is the least that training a drafter takes: fixed tensors (tokens and the target's
states, made beforehand), the drafter's layer, its head and the target's as plain matrix products with
autograd, the same loss, clipping and AdamW. No reading, no padding, no noise, nothing logged, and the
logits of a whole batch at once. `sfdd train-draft` reads cached states from disk and does everything but
loading the model and writing checkpoints. Both take turns; quoted are medians over the rounds.

    python benchmarks/train_throughput.py [--steps 8] [--rounds 5] [--batch-tokens 2048] [DATA ...]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sfdd.artifacts import Provenance
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import open_sources, tokenize
from sfdd.drafters.drafter import Drafter
from sfdd.drafters.loading import new_drafter
from sfdd.drafters.vocabulary import draft_vocabulary
from sfdd.progress import Progress
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import Batch, equal_weights, learnable_tokens, loss_weight, make_batch
from sfdd.training.config import METHODS, TrainConfig
from sfdd.training.data import Split, supervised_counts
from sfdd.training.distributed import ALONE
from sfdd.training.loop import Trainer
from sfdd.training.objectives import LossConfig, loss_sums
from sfdd.training.schedule import BatchPlan
from sfdd.training.supply import Supply, open_states
from sfdd.training.trackers import start_tracker

DATA = Path(__file__).parent.parent / "data"
_STEP_DECAY, _HIDDEN_WEIGHT, _TOKEN_WEIGHT = 0.8, 1.0, 0.1
_SHIFT = 2


class Work:
    """The same steps for both, on cached states."""

    def __init__(self, target: TransformersTarget, config: TrainConfig, data: Split) -> None:
        self.target, self.config, self.data = target, config, data
        self.vocabulary: Tensor | None = None
        if config.method == "eagle3":
            # As large as a large data set makes it: tokens that never occur here come last.
            counts = torch.from_numpy(supervised_counts(data.training, target.vocab_size)) + 1
            self.vocabulary = draft_vocabulary(counts, config.draft_vocab_size)
        self.config = replace(config, aux_layers=self.drafter().aux_layers or None)
        self.states = open_states(self.config, target, data)
        plan = BatchPlan(
            [len(c) for c in data.training],
            batch_tokens=config.batch_tokens,
            epochs=config.epochs,
            seed=config.seed,
            max_steps=config.max_steps,
        )
        self.steps = [[data.training[i] for i in plan.batch(n)] for n in range(plan.total_steps)]

    def drafter(self) -> Drafter:
        return new_drafter(self.config.method, self.target, draft_to_target=self.vocabulary)

    def batch(self, step: Sequence[TokenizedConversation]) -> Batch:
        return make_batch(step, equal_weights, self.states, self.target.device)

    @property
    def tokens(self) -> int:
        """Of all steps but the first, which warms up."""
        return sum(len(c) for step in self.steps[1:] for c in step)


def ours(work: Work, run: Path) -> float:
    """Seconds of all steps but the first, as `sfdd train-draft` does them."""
    config = replace(work.config, run=run)
    supply = Supply(work.data, work.states)
    trainer = Trainer(config, work.target, work.drafter(), supply, Provenance({}), ALONE)
    ends: list[float] = []

    def note(moment: Progress) -> None:
        if moment.stage == "training":
            ends.append(time.perf_counter())

    trainer.run(note, start_tracker(config.tracker, run, 0, {}))
    return ends[-1] - ends[0]


def bare(work: Work) -> float:
    """Seconds of the same steps in plain PyTorch."""
    drafter = work.drafter()
    learning_rate = work.config.highest_learning_rate(work.target.hidden_size)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=learning_rate)
    batches = [
        (work.batch(step), sum(loss_weight(c, equal_weights) for c in step)) for step in work.steps
    ]
    started = 0.0
    for number, (batch, weight) in enumerate(batches):
        if number == 1:
            _synchronize()
            started = time.perf_counter()
        loss = _plain_loss(drafter, batch, work) / weight
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), work.config.max_grad_norm)
        optimizer.step()
    _synchronize()
    return time.perf_counter() - started


def _plain_loss(drafter: Drafter, batch: Batch, work: Work) -> Tensor:
    """The sum of losses over supervised tokens, with autograd through all logits."""
    target, head = work.target, drafter.head(work.target)
    supervised = batch.loss_mask[:, _SHIFT:]  # [B, P]
    true_states = batch.hidden_states[:, 1:-1]  # [B, P, H]
    with torch.no_grad():
        logits = target.logits(true_states[supervised])  # [N, V]
        possible = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        if work.vocabulary is not None:
            vocabulary = work.vocabulary.to(logits.device)
            possible = torch.isin(logits.argmax(-1), vocabulary)
            logits = logits[:, vocabulary]
        wanted = logits.softmax(-1)  # [N, D]
    read = batch.hidden_states if batch.aux_states is None else batch.aux_states
    states = drafter.fuse(read[:, :-_SHIFT].to(drafter.dtype))  # [B, P, H]
    embeddings = target.embedding(batch.input_ids[:, 1:-1])
    earlier: list[tuple[Tensor, Tensor]] = []
    loss = embeddings.new_zeros(())
    for step in range(min(work.config.trained_steps, supervised.shape[1])):
        states, own = drafter.draft_step(embeddings[:, step:], states, tuple(earlier))
        earlier.append(own)
        here = supervised[:, step:]  # row i predicts token i + 2 + step
        among = torch.zeros_like(supervised)
        among[:, step:] = here
        rows = among[supervised]  # [N], which of the supervised tokens this step predicts
        guess = head(drafter.normed(states[here])).log_softmax(-1)  # [n, D]
        token = -(wanted[rows] * guess).sum(-1)[possible[rows]].sum()
        if batch.aux_states is None:
            true = true_states[:, step:][here].to(states.dtype)
            distance = F.smooth_l1_loss(states[here], true, reduction="none").mean(-1).sum()
            token = _HIDDEN_WEIGHT * distance + _TOKEN_WEIGHT * token
        loss = loss + _STEP_DECAY**step * token
        states = states[:, :-1]
    return loss


def _require_the_same_loss(work: Work) -> None:
    """Both must compute the same, or their speeds say nothing."""
    config = LossConfig(ttt_steps=work.config.trained_steps)
    drafter, batch = work.drafter(), work.batch(work.steps[0])
    with torch.no_grad():
        plain = float(_plain_loss(drafter, batch, work))
        trained = float(loss_sums(drafter, batch, work.target, config).total)
    if abs(plain - trained) > 1e-3 * abs(plain):
        sys.exit(f"the bare loop's loss is {plain}, and that of sfdd {trained}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def conversations(
    target: TransformersTarget, names: Sequence[str], max_length: int
) -> list[TokenizedConversation]:
    items = tokenize(open_sources(names), target.tokenizer, max_length)
    return [c for c in items if isinstance(c, TokenizedConversation) and learnable_tokens(c)]


def peak_memory(part: str, work: Work, run: Path) -> float:
    """MiB at the peak of one of the two, in this process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak of loading
    if part == "bare":
        bare(work)
    else:
        ours(work, run)
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def memory_of(part: str, method: str, arguments: Sequence[str]) -> float:
    """`peak_memory` of a process that does one of the two, once."""
    command = [sys.executable, __file__, *arguments, "--part", part, "--method", method]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="*", help="JSONL files; default: data/")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--part", choices=["bare", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.data or sorted(map(str, DATA.glob("chat_*.jsonl")))
    target = TransformersTarget.load(options.target)
    for method in [options.method] if options.method else METHODS:
        with tempfile.TemporaryDirectory() as folder:
            work = prepare(target, method, names, Path(folder), options)
            if options.part:
                print(peak_memory(options.part, work, Path(folder) / "run"))
                return
            report(method, work, Path(folder), options.rounds)
        for part in ("bare", "ours"):
            peak = memory_of(part, method, [*names, *_passed_on(options)])
            print(f"  {part:<18}{peak:>8,.0f} MiB at the peak")


def prepare(
    target: TransformersTarget,
    method: str,
    names: Sequence[str],
    folder: Path,
    options: argparse.Namespace,
) -> Work:
    """As many steps as asked for and one more, and the states of their conversations cached."""
    max_length = min(options.batch_tokens, 2048)
    config = TrainConfig(
        method=method,
        batch_tokens=options.batch_tokens,
        max_length=max_length,
        max_steps=options.steps + 1,
        epochs=100,  # more than that
        checkpoint_every=10**9,
        held_out=0.0,
        cache=folder / "cache",
        precision=options.precision,
    )
    data = conversations(target, names, max_length)
    plan = BatchPlan([len(c) for c in data], batch_tokens=config.batch_tokens, epochs=1, seed=0)
    used = [data[i] for n in range(min(options.steps + 1, plan.total_steps)) for i in plan.batch(n)]
    return Work(target, config, Split(used, []))


def _passed_on(options: argparse.Namespace) -> list[str]:
    names = ("target", "steps", "batch_tokens", "precision")
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]


def report(method: str, work: Work, folder: Path, rounds: int) -> None:
    """Measure both in turn and print what came out."""
    count = sum(len(step) for step in work.steps[1:])
    vocabulary = "" if work.vocabulary is None else f", draft vocabulary {len(work.vocabulary):,}"
    print(
        f"{method}: {len(work.steps) - 1} steps, {count} conversations, {work.tokens:,} tokens"
        f"{vocabulary}; {torch.get_num_threads()} threads, {work.target.device}, "
        f"{work.config.precision}"
    )
    _require_the_same_loss(work)
    bares, mine = [], []
    for number in range(1, rounds + 1):
        bares.append(bare(work))
        mine.append(ours(work, folder / f"run-{number}"))
        print(f"round {number}: bare {bares[-1]:.1f} s, ours {mine[-1]:.1f} s", file=sys.stderr)
    ratios = [b / m for b, m in zip(bares, mine, strict=True)]
    print(f"  {'bare loop':<18}{work.tokens / statistics.median(bares):>8,.0f} tokens/s")
    print(f"  {'sfdd train-draft':<18}{work.tokens / statistics.median(mine):>8,.0f} tokens/s")
    print(
        f"  sfdd train-draft / bare loop: median {statistics.median(ratios):.3f} "
        f"(from {min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds)"
    )


if __name__ == "__main__":
    main()
