"""What exact statistics cost inside vLLM, against its bare prefill and its own log-probabilities.

    python benchmarks/score_vllm.py [DATA] [--conversations 60] [--rounds 5] [--gpu]

Two processes, each with an engine inside it, take turns over the same conversations:

- prefill: one token is generated, so the head runs on one row of each prompt: the limit;
- head: our pooler without the statistics, on supervised rows and on all rows;
- ours: the same with the statistics;
- prompt_logprobs=20: what vLLM offers itself, for all rows.

Quoted are medians, as ratios to the prefill of the same round. Errors of flatness are against
transformers in float32; from 20 log-probabilities it is computed as if the rest were spread evenly. With
--gpu the target's own type, a compiled engine and the GPU's memory; NOT RUN ON A GPU YET.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources, tokenize
from sfdd.targets.loading import TargetSource

ROOT = Path(__file__).parents[1]
TOP = 20
MODES = ("prefill", "head", "ours", "head, all rows", "ours, all rows", f"prompt_logprobs={TOP}")
OF_GENERATION = ("prefill", MODES[-1])


def read(options: argparse.Namespace) -> list[TokenizedConversation]:
    tokenizer = TargetSource(options.target).load_tokenizer()
    items = tokenize(open_sources((options.data,)), tokenizer, options.max_length, MaskConfig())
    samples = [item for item in items if not isinstance(item, Skipped)]
    return samples[: options.conversations]


def flatness_of_top(prompt_logprobs: Any, sample: TokenizedConversation, size: int) -> Any:
    """Flatness of each supervised token from the likeliest `TOP` tokens alone."""
    values = []
    for position in sample.loss_mask.nonzero()[0]:
        ranked = [entry for entry in prompt_logprobs[position].values() if entry.rank <= TOP]
        p = np.exp([entry.logprob for entry in ranked])
        rest = max(0.0, 1 - p.sum())
        values.append(1 / np.sqrt(size * ((p**2).sum() + rest**2 / (size - len(p)))))
    return np.array(values)


def every_row(sample: TokenizedConversation) -> TokenizedConversation:
    mask = np.arange(len(sample)) > 0
    return TokenizedConversation(sample.origin, sample.id, sample.input_ids, mask)


class Pooling:
    """sfdd's backend, whose statistics can be left out."""

    def __init__(self, options: argparse.Namespace) -> None:
        from sfdd.targets.backend import open_backend
        from sfdd.targets.config import BackendConfig
        from sfdd.targets.vllm import pooler

        self._pooler: Any = pooler
        self._statistics = self._pooler.logits_statistics
        config = BackendConfig(
            backend="vllm",
            batch_tokens=options.batch_tokens,
            tensor_parallel_size=options.tensor_parallel_size,
            engine_args={"enforce_eager": not options.gpu, "enable_prefix_caching": False},
        )
        self._backend = open_backend(options.target, config, options.max_length)

    def run(self, mode: str, samples: list[TokenizedConversation]) -> Any:
        import torch

        def nothing(logits: Any, next_ids: Any) -> Any:
            return torch.zeros(6, len(next_ids), device=next_ids.device)

        self._pooler.logits_statistics = nothing if mode.startswith("head") else self._statistics
        if mode.endswith("all rows"):
            samples = [every_row(sample) for sample in samples]
        found = {
            sample.id: stats.flatness.tolist()
            for batch in self._backend.token_stats(samples)
            for sample, stats in zip(*batch, strict=True)
        }
        return [found[sample.id] for sample in samples] if mode == "ours" else None


class Generating:
    """vLLM as it is."""

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        from sfdd.targets.vllm.engine import check_version, resolve_dtype

        check_version()
        source = TargetSource(options.target)
        self._llm = LLM(
            source.weights,
            dtype=resolve_dtype(source, "auto"),
            max_model_len=options.max_length + 1,
            max_num_batched_tokens=options.batch_tokens,
            tensor_parallel_size=options.tensor_parallel_size,
            enforce_eager=not options.gpu,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def run(self, mode: str, samples: list[TokenizedConversation]) -> Any:
        from vllm import SamplingParams, TokensPrompt

        top = None if mode == "prefill" else TOP
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=sample.input_ids.tolist()) for sample in samples],
            SamplingParams(max_tokens=1, prompt_logprobs=top, detokenize=False, temperature=0.0),
            use_tqdm=False,
        )
        if mode == "prefill":
            return None
        size = self._llm.llm_engine.model_config.get_vocab_size()
        return [
            flatness_of_top(output.prompt_logprobs, sample, size).tolist()
            for output, sample in zip(outputs, samples, strict=True)
        ]


def serve(options: argparse.Namespace) -> None:
    """A process of one engine: modes in, seconds and flatness out, a line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print
    samples = read(options)
    engine = Pooling(options) if options.serve == "pooling" else Generating(options)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        flatness = engine.run(line.strip(), samples)
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "flatness": flatness, "memory": peak_memory()}
        print(json.dumps(answer), file=answers, flush=True)


def peak_memory() -> float:
    """MiB: of the GPU where there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    line = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    return int(line.split()[0]) / 2**10


def start(kind: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--serve", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def ask(process: "subprocess.Popen[str]", mode: str) -> dict[str, Any]:
    assert process.stdin
    assert process.stdout
    print(mode, file=process.stdin, flush=True)
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def exact_flatness(options: argparse.Namespace, samples: list[TokenizedConversation]) -> Any:
    from sfdd.targets.transformers_target import TransformersTarget

    target = TransformersTarget.load(options.target, dtype="float32")
    return np.concatenate([target.token_stats([sample])[0].flatness for sample in samples])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?", default=str(ROOT / "data/chat_sharegpt.jsonl"))
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return

    samples = read(options)
    tokens = sum(map(len, samples))
    supervised = sum(sample.num_supervised_tokens for sample in samples)
    print(f"{len(samples)} conversations, {tokens:,} tokens, {supervised:,} supervised")
    exact = exact_flatness(options, samples)
    pooling, generating = start("pooling"), start("generating")
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(options.rounds + 1):
        answers = {
            mode: ask(generating if mode in OF_GENERATION else pooling, mode)
            for mode in (MODES if number % 2 else MODES[::-1])
        }
        rounds += [answers] * (number > 0)  # the first warms up
    print(f"\n{'':<20}{'tokens/s':>10}{'of prefill':>12}   {'error of flatness: mean, p99, max'}")
    for mode in MODES:
        seconds = statistics.median(answers[mode]["seconds"] for answers in rounds)
        ratio = statistics.median(a[mode]["seconds"] / a["prefill"]["seconds"] for a in rounds)
        flatness = rounds[0][mode]["flatness"]
        errors = ""
        if flatness:
            error = np.abs(np.concatenate(flatness) / exact - 1)
            errors = f"{error.mean():.1e}  {np.percentile(error, 99):.1e}  {error.max():.1e}"
        print(f"{mode:<20}{tokens / seconds:>10,.0f}{ratio:>11.2f}x   {errors}")
    for name, of, to in (("supervised rows", "ours", "head"), ("all rows", MODES[4], MODES[3])):
        ratio = statistics.median(a[of]["seconds"] / a[to]["seconds"] for a in rounds)
        print(f"ours / (prefill + head), {name}: {ratio:.2f}")
    ratio = statistics.median(a["ours"]["seconds"] / a[MODES[-1]]["seconds"] for a in rounds)
    print(f"ours / prompt_logprobs={TOP}: {ratio:.2f}")
    for name, mode in (("pooling", "ours"), ("generating", "prefill")):
        print(f"peak memory, {name}: {rounds[-1][mode]['memory']:,.0f} MiB")
    for process in (pooling, generating):
        process.kill()


if __name__ == "__main__":
    main()
