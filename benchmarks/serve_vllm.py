"""Serve a trained drafter with vLLM: is the output unchanged, and what acceptance length does vLLM see?

    sfdd eval PROMPTS --run RUN --num-speculative-tokens 3 --max-new-tokens 64      # first
    python benchmarks/serve_vllm.py RUN

Needs the environment of 'make install-vllm'. The prompts, their responses' length and the number of
draft tokens are those of RUN/eval.json; of every prompt the first turn is decoded greedily in float32,
without and with the drafter, by an engine each.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from sfdd.artifacts import RunDirectory
from sfdd.evaluation.prompts import read_prompts
from sfdd.targets.loading import TargetSource


def decode(
    source: TargetSource, prompts: list[list[int]], max_new_tokens: int, drafting: Any
) -> tuple[list[list[int]], dict[str, float]]:
    """The greedy responses, and vLLM's counters."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        source.weights,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=drafting,
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=max_new_tokens),
        use_tqdm=False,
    )
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


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
    tokenizer = source.load_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.turns[0]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for prompt in read_prompts(tuple(map(Path, settings["prompts"])), settings["limit"])
    ]
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
    print(f"{method}: {equal}/{len(prompts)} responses as without the drafter")
    print(f"acceptance length tau  vLLM {1 + accepted / drafts:.3f}  ({drafts:,.0f} drafts)")


if __name__ == "__main__":
    main()
