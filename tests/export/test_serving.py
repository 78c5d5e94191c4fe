"""vLLM loads what `sfdd train-draft` writes, as it is, and serves with it. Run by 'make test-vllm'."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_target

from sfdd.artifacts import Provenance
from sfdd.drafters.loading import new_drafter
from sfdd.targets.transformers_target import TransformersTarget

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
)

SERVE = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
target, drafting = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(
    target, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=False,
    skip_tokenizer_init=True, speculative_config=drafting,
)
ids = [[(7 * i + j) % 257 + 3 for j in range(20 + i)] for i in range(4)]
prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in ids]
outputs = llm.generate(
    prompts,
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False),
    use_tqdm=False,
)
drafts = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts"]
print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], sum(drafts)]))
"""


def serve(target: Path, drafting: dict[str, object] | None) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(target), json.dumps(drafting)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(
        tmp_path_factory.mktemp("targets") / "tiny",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=8,
    )


@pytest.fixture(scope="module")
def plain(target: Path) -> object:
    return serve(target, None)[0]


@pytest.mark.parametrize("method", ["eagle", "eagle3", "eagle3 of 100 tokens"])
def test_the_output_is_that_of_plain_vllm(
    method: str, target: Path, plain: object, tmp_path: Path
) -> None:
    loaded = TransformersTarget.load(str(target))
    name, _, limited = method.partition(" ")
    vocabulary = torch.arange(3, 203, 2) if limited else None
    drafter = new_drafter(name, loaded, draft_to_target=vocabulary)
    drafter.save(tmp_path / "drafter", Provenance({}))
    drafting = {"method": name, "model": str(tmp_path / "drafter"), "num_speculative_tokens": 3}
    tokens, drafts = serve(target, drafting)
    assert tokens == plain
    assert isinstance(drafts, int | float)
    assert drafts > 20
