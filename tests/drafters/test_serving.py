"""Which targets vLLM serves with a drafter, by hand-picked families."""

import subprocess
import sys

import pytest

from sfdd.drafters.serving import why_not_served

BOTH = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "phi3", "granite", "gpt_oss"]
BOTH += ["minicpm", "gemma4_text", "smollm3", "olmo2"]
EAGLE_ALONE = ["gemma", "gemma3_text", "glm4", "exaone4", "mixtral", "qwen2_moe"]


@pytest.mark.parametrize("model_type", BOTH)
def test_served(model_type: str) -> None:
    assert why_not_served("eagle", model_type) is None
    assert why_not_served("eagle3", model_type) is None


@pytest.mark.parametrize("model_type", EAGLE_ALONE)
def test_served_with_eagle_alone(model_type: str) -> None:
    assert why_not_served("eagle", model_type) is None
    assert why_not_served("eagle3", model_type) == (
        f"vLLM 0.32 cannot serve eagle3 drafters for {model_type} targets: its model of such a target "
        "does not hand on the hidden states of inner layers; train one with --method eagle."
    )


def test_served_with_eagle3_alone() -> None:
    assert why_not_served("eagle3", "cohere2_moe") is None
    assert why_not_served("eagle", "cohere2_moe") == (
        "vLLM 0.32 cannot serve eagle drafters for cohere2_moe targets: its model of such a target has "
        "no lm_head, which an eagle drafter shares; train one with --method eagle3."
    )


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "gpt_neox"])
def test_served_with_none(model_type: str) -> None:
    for method in ("eagle", "eagle3"):
        assert str(why_not_served(method, model_type)).endswith("; use another target or engine.")


def test_asking_imports_nothing_heavy() -> None:
    code = "import sys, sfdd.drafters.serving; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
