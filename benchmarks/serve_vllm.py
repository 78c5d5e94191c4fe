"""Serve a trained drafter with vLLM: is the output unchanged, and what acceptance length does vLLM see?

    sfdd eval PROMPTS --run RUN --num-speculative-tokens 3 --max-new-tokens 64      # first
    python benchmarks/serve_vllm.py RUN

Needs the environment of 'make install-vllm'. The prompts, their responses' length and the number of
draft tokens are those of RUN/eval.json; every turn is decoded greedily in float32, without and with the
drafter, by an engine each, which reads its own responses to the turns before.
"""

import argparse
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sfdd.artifacts import RunDirectory
from sfdd.evaluation.prompts import Prompt, read_prompts
from sfdd.targets.loading import TargetSource


def decode(
    source: TargetSource, prompts: list[Prompt], max_new_tokens: int, drafting: Any
) -> tuple[list[list[int]], dict[str, float]]:
    """The greedy responses, first turns first, and vLLM's counters."""
    from vllm import LLM, SamplingParams, TokensPrompt

    tokenizer = source.load_tokenizer()

    llm = LLM(
        source.weights,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=drafting,
    )
    responses = []
    conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
    for turns in zip_longest(*(prompt.turns for prompt in prompts)):
        going_on = [(c, turn) for c, turn in zip(conversations, turns, strict=True) if turn]
        for conversation, turn in going_on:
            conversation.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(
            [conversation for conversation, _ in going_on],
            add_generation_prompt=True,
            return_dict=False,
        )
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in ids],
            SamplingParams(temperature=0.0, max_tokens=max_new_tokens),
            use_tqdm=False,
        )
        for (conversation, _), output in zip(going_on, outputs, strict=True):
            response = list(output.outputs[0].token_ids)
            text = tokenizer.decode(response, skip_special_tokens=True)
            conversation.append({"role": "assistant", "content": text})
            responses.append(response)
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    llm.llm_engine.engine_core.shutdown()
    return responses, counters


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    options = parser.parse_args()
    run = RunDirectory(options.run)
    evaluated = json.loads(run.evaluation.read_text(encoding="utf-8"))
    settings = evaluated["provenance"]["about"]["settings"]
    config = json.loads((run.drafter / "config.json").read_text(encoding="utf-8"))
    method = "eagle3" if config["architectures"] == ["LlamaForCausalLMEagle3"] else "eagle"
    source = TargetSource(evaluated["provenance"]["about"]["target"])
    prompts = read_prompts(tuple(map(Path, settings["prompts"])), settings["limit"])
    drafting = {
        "method": method,
        "model": str(run.drafter),
        "num_speculative_tokens": settings["num_speculative_tokens"],
    }
    plain, _ = decode(source, prompts, settings["max_new_tokens"], None)
    drafted, counters = decode(source, prompts, settings["max_new_tokens"], drafting)
    equal = sum(one == other for one, other in zip(plain, drafted, strict=True))
    drafts = counters["vllm:spec_decode_num_drafts"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    print(f"{method}: {equal}/{len(plain)} responses as without the drafter")
    print(f"acceptance length tau  vLLM {1 + accepted / drafts:.3f}  ({drafts:,.0f} drafts)")


if __name__ == "__main__":
    main()
