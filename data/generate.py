"""Make the sample conversations in this folder from ``prompts.jsonl``.

Every prompt is answered by a local chat model (SmolLM2-135M-Instruct for the files
that are shipped).  Prompts are numbered from 1 in file order: odd ones are answered
greedily, even ones by pure sampling at temperature 1.  Conversations 1, 2, 5, 6, ...
are written in the ShareGPT layout and 3, 4, 7, 8, ... in the OpenAI layout, so that
both files hold both kinds of answers.

    python data/generate.py --model path/to/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
SHAREGPT_ROLES = {"system": "system", "user": "human", "assistant": "gpt"}


@dataclass
class Conversation:
    """One prompt and the messages exchanged so far."""

    number: int
    prompt: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    finish: str = "stop"  # "length" as soon as one answer hits the token limit
    empty: bool = False  # True as soon as one answer has no text; such a one is dropped

    @property
    def greedy(self) -> bool:
        """Whether the answers are greedy (else sampled at temperature 1)."""
        return self.number % 2 == 1

    @property
    def sharegpt(self) -> bool:
        """Whether it is written in the ShareGPT layout (else in the OpenAI one)."""
        return (self.number - 1) // 2 % 2 == 0

    def record(self) -> dict[str, Any]:
        """Return the conversation as the JSON object of its layout."""
        out: dict[str, Any] = {"id": self.prompt["id"]}
        if self.sharegpt:
            out["conversations"] = [
                {"from": SHAREGPT_ROLES[m["role"]], "value": m["content"]} for m in self.messages
            ]
        else:
            out["messages"] = self.messages
        out["category"] = self.prompt["category"]
        out["sampling"] = "greedy" if self.greedy else "temperature-1"
        out["finish"] = self.finish
        return out


def load_prompts(path: Path, limit: int | None) -> list[Conversation]:
    """Read the prompts, each as a conversation that holds only its system message."""
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    talks = [Conversation(number, json.loads(line)) for number, line in enumerate(lines, 1)]
    for talk in talks:
        if "system" in talk.prompt:
            talk.messages.append({"role": "system", "content": talk.prompt["system"]})
    return talks


@torch.inference_mode()
def answer(
    batch: list[Conversation], model: Any, tokenizer: Any, greedy: bool, max_new_tokens: int
) -> int:
    """Append the model's next answer to each conversation; return the tokens generated."""
    texts = [
        tokenizer.apply_chat_template(talk.messages, tokenize=False, add_generation_prompt=True)
        for talk in batch
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {} if greedy else {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    output = model.generate(
        **inputs,
        do_sample=not greedy,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    total = 0
    for talk, ids in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        stopped = tokenizer.eos_token_id in ids
        if stopped:
            ids = ids[: ids.index(tokenizer.eos_token_id)]
        else:
            talk.finish = "length"
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        talk.messages.append({"role": "assistant", "content": text})
        talk.empty = talk.empty or not text.strip()
        total += len(ids) + stopped
    return total


def generate(
    talks: list[Conversation], model: Any, tokenizer: Any, args: argparse.Namespace
) -> None:
    """Answer all turns: turn by turn, greedy and sampled apart, in batches of like length."""
    start, total, batches = time.perf_counter(), 0, 0
    for turn in range(max(len(talk.prompt["turns"]) for talk in talks)):
        active = [t for t in talks if len(t.prompt["turns"]) > turn and not t.empty]
        for talk in active:
            talk.messages.append({"role": "user", "content": talk.prompt["turns"][turn]})
        active.sort(key=lambda t: sum(len(m["content"]) for m in t.messages))
        for greedy in (True, False):
            group = [t for t in active if t.greedy == greedy]
            for first in range(0, len(group), args.batch_size):
                batch = group[first : first + args.batch_size]
                torch.manual_seed(args.seed * 100_003 + batches)
                batches += 1
                total += answer(batch, model, tokenizer, greedy, args.max_new_tokens)
                spent = time.perf_counter() - start
                print(
                    f"turn {turn + 1}, batch {batches}: {total} tokens in {spent:.0f} s"
                    f" ({total / spent:.1f}/s)",
                    file=sys.stderr,
                )


def main() -> None:
    """Parse the arguments, answer the prompts and write the two files."""
    parser = argparse.ArgumentParser(description="Answer the prompts with a local chat model.")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--out-dir", type=Path, default=HERE, help="where the two files go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=220)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--limit", type=int, help="use only the first LIMIT prompts")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    talks = load_prompts(args.prompts, args.limit)
    generate(talks, model, tokenizer, args)
    for name, sharegpt in (("chat_sharegpt.jsonl", True), ("chat_openai.jsonl", False)):
        kept = [t.record() for t in talks if t.sharegpt == sharegpt and not t.empty]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept]
        (args.out_dir / name).write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{name}: {len(kept)} conversations", file=sys.stderr)


if __name__ == "__main__":
    main()
