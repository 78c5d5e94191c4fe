"""`sfdd score` on a GPU: tokens/s, fraction of the body's forward pass, memory.

NOT RUN ON ONE YET: no GPU was at hand.

    python benchmarks/score_gpu.py --target meta-llama/Llama-3.1-8B-Instruct chats.jsonl
        [--dtype bfloat16] [--batch-tokens 32768] [--rounds 5]

The body alone gets the same tokens, packed without padding into rows of the data's typical length. They
take turns; quoted are medians. With --device cpu it runs anywhere, which is how it was tried.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from score_throughput import Work, tokenized

from sfdd.conversations.pipeline import open_sources
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score_with
from sfdd.targets.transformers_backend import TransformersBackend
from sfdd.targets.transformers_target import TransformersTarget


def synchronize(target: TransformersTarget) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


@torch.inference_mode()
def body_alone(target: TransformersTarget, work: Work, batch_tokens: int) -> float:
    """Seconds of the body over all tokens."""
    rows = max(1, batch_tokens // work.row_length)
    tokens = work.tokens.to(target.device)
    synchronize(target)
    started = time.perf_counter()
    for batch in torch.split(tokens, rows * work.row_length):
        count = -(-len(batch) // work.row_length)
        width = len(batch) // count
        target.hidden_states(batch[: count * width].view(count, width))
    synchronize(target)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attn-implementation")
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--logits-memory", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    target = TransformersTarget.load(
        options.target,
        dtype=options.dtype,
        device=options.device,
        attn_implementation=options.attn_implementation,
    )
    work = Work.of(tokenized(target, Path(options.data)))
    print(
        f"{work.conversations} conversations, {len(work.tokens):,} tokens, {work.supervised:,} "
        f"supervised; {target.device}, {target.model.dtype}"
    )
    backend = TransformersBackend(target, options.batch_tokens, options.logits_memory)
    body_alone(target, work, options.batch_tokens)  # warm-up
    bodies, ours, paddings = [], [], []
    for _ in range(options.rounds):
        bodies.append(body_alone(target, work, options.batch_tokens))
        with tempfile.TemporaryDirectory() as folder:
            config = ScoreConfig(
                (options.data,),
                options.target,
                run=Path(folder),
            )
            report = score_with(backend, open_sources(config.data), config)
        ours.append(report.seconds)
        paddings.append(report.padding)
    body, mine = statistics.median(bodies), statistics.median(ours)
    print(f"body alone  {len(work.tokens) / body:>10,.0f} tokens/s")
    print(f"sfdd score  {len(work.tokens) / mine:>10,.0f} tokens/s, {body / mine:.3f} of the body")
    print(f"padding     {statistics.median(paddings):.1%} of the computed tokens")
    if target.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(target.device) / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
