"""How close `sfdd score` comes to the bare forward pass: tokens/s and peak memory, both in one run.

The *bare forward* is the least that any scorer must compute: the target's body over the same tokens,
packed without padding into rows of the data's typical length, and its head at as many positions as are
supervised. No reading, no tokenizing, no statistics, nothing written. `sfdd score` is everything
except loading the model. The *reference path* gets the same scores as the code released with the paper
does: one conversation at a time, its hidden states written to disk and read again, a drafter's forward,
softmax and cosine in chunks of 64 tokens; it is given a fifth of the conversations. All three take turns;
quoted are medians over the rounds.

    python benchmarks/score_throughput.py [--conversations 300] [--rounds 5] [DATA ...]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import open_sources, tokenize
from sfdd.drafters.eagle import EagleDrafter
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score_with
from sfdd.targets.config import BATCH_TOKENS
from sfdd.targets.transformers_backend import TransformersBackend
from sfdd.targets.transformers_target import TransformersTarget

DATA = Path(__file__).parent.parent / "data"
_REFERENCE_EVERY = 5


@dataclass(frozen=True)
class Work:
    """What a data set asks of the target."""

    conversations: int
    tokens: torch.Tensor  # [sum of T], one conversation after the other
    supervised: int
    row_length: int  # token-weighted mean length: the attention cost of a typical token

    @classmethod
    def of(cls, conversations: list[TokenizedConversation]) -> "Work":
        lengths = [len(conversation) for conversation in conversations]
        return cls(
            conversations=len(lengths),
            tokens=torch.cat([torch.from_numpy(c.input_ids) for c in conversations]).long(),
            supervised=sum(c.num_supervised_tokens for c in conversations),
            row_length=sum(n * n for n in lengths) // sum(lengths),
        )


@torch.inference_mode()
def bare_forward(target: TransformersTarget, work: Work) -> tuple[float, float]:
    """Seconds of the body and of the head for this amount of work."""
    tokens = work.tokens.to(target.device)
    rows = max(1, BATCH_TOKENS // work.row_length)
    started = time.perf_counter()
    for batch in torch.split(tokens, rows * work.row_length):
        count = -(-len(batch) // work.row_length)  # of the last batch fewer, and shorter ones
        width = len(batch) // count
        hidden = target.hidden_states(batch[: count * width].view(count, width))
    body = time.perf_counter() - started
    states = hidden.reshape(-1, target.hidden_size)[: target.rows_per_chunk]
    for _ in range(-(-work.supervised // len(states))):
        target.logits(states)
    return body, time.perf_counter() - started - body


def sfdd_score(target: TransformersTarget, data: Path) -> tuple[float, float]:
    """Seconds of reading, tokenizing, forward, statistics and Parquet; and the padding's share."""
    with tempfile.TemporaryDirectory() as folder:
        config = ScoreConfig((str(data),), target.source.name, run=Path(folder) / "run")
        started = time.perf_counter()
        report = score_with(TransformersBackend(target), open_sources(config.data), config)
        return time.perf_counter() - started, report.padding


@torch.inference_mode()
def reference_path(
    target: TransformersTarget, drafter: EagleDrafter, conversations: list[TokenizedConversation]
) -> float:
    """Tokens/s of the released code's way to the same scores."""
    vocab_size = target.vocab_size
    uniform = torch.full((vocab_size,), 1 / vocab_size)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, conversation in enumerate(conversations):
            path = Path(folder) / f"{number}.safetensors"
            ids = torch.from_numpy(conversation.input_ids).long()[None].to(target.device)
            hidden = target.hidden_states(ids)[0].cpu()
            save_file({"input_ids": ids[0].cpu(), "hidden_state": hidden}, path)
        for number, conversation in enumerate(conversations):
            stored = load_file(Path(folder) / f"{number}.safetensors")
            hidden = stored["hidden_state"][None].to(target.device)
            embeddings = target.embedding(stored["input_ids"].to(target.device))[None]
            drafter(embeddings[:, 1:], hidden[:, :-1])
            cosines = []
            for chunk in torch.split(hidden[0], 64):
                p = target.logits(chunk).softmax(-1)
                cosines.append(torch.nn.functional.cosine_similarity(p, uniform[None], dim=-1))
            torch.cat(cosines)[torch.from_numpy(conversation.loss_mask)].mean()
    seconds = time.perf_counter() - started
    return sum(map(len, conversations)) / seconds


def sample(names: list[str], count: int, folder: Path) -> Path:
    """The first `count` lines, taken in turn from some JSONL files, as one file."""
    files = [Path(name).read_bytes().splitlines(keepends=True) for name in names]
    in_turn = (line for lines in zip(*files, strict=False) for line in lines)
    path = folder / "sample.jsonl"
    path.write_bytes(b"".join(islice(in_turn, count)))
    return path


def tokenized(target: TransformersTarget, data: Path) -> list[TokenizedConversation]:
    items = tokenize(open_sources([str(data)]), target.tokenizer, ScoreConfig.max_length)
    return [item for item in items if isinstance(item, TokenizedConversation)]


def peak_memory(part: str, data: Path, target: str) -> float:
    """MiB at the peak of a process that does one of the two, once, after loading the model."""
    command = [sys.executable, __file__, "--target", target, "--part", part, str(data)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_part(part: str, data: Path, target_name: str) -> None:
    target = TransformersTarget.load(target_name)
    work = Work.of(tokenized(target, data))
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak of loading
    if part == "bare":
        bare_forward(target, work)
    elif part == "ours":
        sfdd_score(target, data)
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="*", help="JSONL files; default: data/")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["load", "bare", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part, Path(options.data[0]), options.target)
        return

    names = options.data or sorted(map(str, DATA.glob("chat_*.jsonl")))
    with tempfile.TemporaryDirectory() as folder:
        data = sample(names, options.conversations, Path(folder))
        target = TransformersTarget.load(options.target)
        conversations = tokenized(target, data)
        work = Work.of(conversations)
        drafter = EagleDrafter.for_target(target).eval()
        print(
            f"{work.conversations} conversations, {len(work.tokens):,} tokens, "
            f"{work.supervised:,} supervised; {torch.get_num_threads()} threads, "
            f"{target.device}, {target.model.dtype}"
        )
        bare_forward(target, replace(work, tokens=work.tokens[:1000], supervised=100))  # warm-up

        bodies, bares, ours, references, paddings = [], [], [], [], []
        for number in range(1, options.rounds + 1):
            body, head = bare_forward(target, work)
            seconds, padding = sfdd_score(target, data)
            ours.append(seconds)
            paddings.append(padding)
            part = conversations[::_REFERENCE_EVERY]
            references.append(reference_path(target, drafter, part))
            bodies.append(body)
            bares.append(body + head)
            print(
                f"round {number}: bare {bares[-1]:.1f} s, sfdd score {ours[-1]:.1f} s, "
                f"reference {references[-1]:,.0f} tokens/s",
                file=sys.stderr,
            )

        ratios = [bare / mine for bare, mine in zip(bares, ours, strict=True)]
        memory = {
            part: peak_memory(part, data, options.target) for part in ("load", "bare", "ours")
        }

    def speed(seconds: list[float]) -> str:
        return f"{len(work.tokens) / statistics.median(seconds):>8,.0f}"

    print(f"{'':<22}{'tokens/s':>8}  peak memory")
    print(f"{'body alone':<22}{speed(bodies)}")
    print(f"{'bare forward':<22}{speed(bares)}  {memory['bare']:,.0f} MiB")
    print(f"{'sfdd score':<22}{speed(ours)}  {memory['ours']:,.0f} MiB")
    print(f"{'reference path':<22}{statistics.median(references):>8,.0f}")
    print(f"{'model loaded':<22}{'':>8}  {memory['load']:,.0f} MiB")
    print(f"padding: {statistics.median(paddings):.1%} of the computed tokens")
    print(
        f"sfdd score / bare forward: median {statistics.median(ratios):.3f} "
        f"(from {min(ratios):.3f} to {max(ratios):.3f}, {options.rounds} rounds)"
    )
    faster = [len(work.tokens) / s / r for s, r in zip(ours, references, strict=True)]
    print(
        f"sfdd score / reference path: median {statistics.median(faster):.2f} "
        f"(from {min(faster):.2f} to {max(faster):.2f})"
    )


if __name__ == "__main__":
    main()
