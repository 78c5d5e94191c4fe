"""vLLM loads what sfdd trains and exports, serves with it, and accepts what `sfdd eval` says it accepts.

Run by 'make test-vllm'.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_tiny_target

from sfdd.artifacts import Provenance
from sfdd.conversations.conversation import Origin, TokenizedConversation
from sfdd.drafters.loading import load_drafter, new_drafter
from sfdd.evaluation.acceptance import AcceptanceStats
from sfdd.evaluation.decoding import Limits, autoregressive_decode, speculative_decode
from sfdd.evaluation.proposing import EagleProposer
from sfdd.evaluation.verification import Sampling
from sfdd.export.config import ExportConfig
from sfdd.export.drafters import export_drafter
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.config import TrainConfig
from sfdd.training.run import train_draft

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
)

TOKENS, DRAFT_TOKENS = 48, 3
PROMPTS = [[(7 * i + j) % 257 + 3 for j in range(20 + i % 4)] for i in range(168)]
LEARNT, ASKED = range(160), PROMPTS[160:]
SERVE = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
target, drafting, prompts, tokens = sys.argv[1], *map(json.loads, sys.argv[2:])
llm = LLM(
    target, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=False,
    skip_tokenizer_init=True, speculative_config=drafting,
)
outputs = llm.generate(
    [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
    SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
    use_tqdm=False,
)
metrics = [m for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")]
counted = {m.name: m.value for m in metrics}
print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], counted]))
"""


def serve(
    target: Path, drafting: dict[str, object] | None
) -> tuple[list[list[int]], dict[str, float]]:
    """vLLM's greedy responses to what is asked, and what it counted."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(target), *map(json.dumps, (drafting, ASKED, TOKENS))],
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
    responses, counted = json.loads(done.stdout.splitlines()[-1])
    return responses, counted


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with grouped heads of another size than hidden size / heads, and scaled positions."""
    return save_tiny_target(
        tmp_path_factory.mktemp("targets") / "tiny",
        hidden_size=64,
        head_dim=32,
        num_hidden_layers=8,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )


@pytest.fixture(scope="module")
def target(directory: Path) -> TransformersTarget:
    return TransformersTarget.load(str(directory))


@pytest.fixture(scope="module")
def plain(directory: Path) -> list[list[int]]:
    return serve(directory, None)[0]


def _sampling(target: TransformersTarget) -> Sampling:
    return Sampling.seeded(0.0, 0, target.device)


def _continued(target: TransformersTarget, number: int) -> TokenizedConversation:
    """A prompt and the target's own greedy response."""
    prompt = torch.tensor(PROMPTS[number])
    response = autoregressive_decode(target, prompt, Limits(40), _sampling(target)).tokens
    ids = np.array([*PROMPTS[number], *response], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return TokenizedConversation(Origin("made", number), f"made:{number}", ids, mask)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_trained_drafter_is_accepted_as_evaluated_and_changes_no_token(
    method: str, target: TransformersTarget, directory: Path, plain: object, tmp_path: Path
) -> None:
    settings = {"ttt_steps": 3} if method == "eagle3" else {"token_loss_weight": 1.0}
    config = TrainConfig(
        target=str(directory),
        run=tmp_path,
        method=method,
        epochs=15,
        learning_rate=3e-3,
        batch_tokens=512,
        tracker="none",
        **settings,
    )
    train_draft(config, target, [_continued(target, number) for number in LEARNT])
    exported = export_drafter(ExportConfig("vllm", run=tmp_path)).output
    proposer = EagleProposer(load_drafter(exported, target).eval(), target)
    decoded = [
        speculative_decode(
            target, proposer, torch.tensor(prompt), Limits(TOKENS), _sampling(target), DRAFT_TOKENS
        )
        for prompt in ASKED
    ]
    evaluated = sum((one.acceptance for one in decoded), AcceptanceStats())
    assert evaluated.acceptance_length is not None
    assert evaluated.acceptance_length > 1.8

    drafting = {"method": method, "model": str(exported), "num_speculative_tokens": DRAFT_TOKENS}
    responses, counted = serve(directory, drafting)
    assert responses == plain == [list(one.tokens) for one in decoded]
    drafts = counted["vllm:spec_decode_num_drafts"]
    # vLLM drafts to the last token, sfdd as far as there is room: a draft or two more of each response.
    assert 0 <= drafts - evaluated.num_drafts <= 2 * len(ASKED)
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    assert 1 + accepted / drafts == pytest.approx(evaluated.acceptance_length, rel=0.05)


def test_a_drafter_of_the_whole_vocabulary_is_loaded(
    target: TransformersTarget, directory: Path, plain: object, tmp_path: Path
) -> None:
    new_drafter("eagle3", target).save(tmp_path, Provenance({}))
    drafting = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": DRAFT_TOKENS}
    responses, counted = serve(directory, drafting)
    assert responses == plain
    assert counted["vllm:spec_decode_num_drafts"] > 20
