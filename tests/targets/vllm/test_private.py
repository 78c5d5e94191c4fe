"""The names of vLLM that it does not promise to keep: where this fails, they moved."""

import inspect

import torch
import vllm
from vllm.inputs import tokens_input
from vllm.model_executor.layers.pooler import PoolingParamsUpdate
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.interfaces_base import VllmModelForPooling
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.pool.metadata import PoolingCursor, PoolingMetadata, PoolingStates

from sfdd.targets.vllm import private


def test_the_registry() -> None:
    assert "LlamaForCausalLM" in private.text_generation_architectures()
    assert "LlavaForConditionalGeneration" in private.multimodal_architectures()
    assert private.model_class("LlamaForCausalLM").__name__ == "LlamaForCausalLM"


def test_settings_by_architecture() -> None:
    """Hybrid and other unusual models need theirs under sfdd's name, too."""
    vllm.plugins.load_general_plugins()
    assert MODELS_CONFIG_MAP["SfddGptOssForCausalLM"] is MODELS_CONFIG_MAP["GptOssForCausalLM"]
    assert MODELS_CONFIG_MAP["SfddMamba2ForCausalLM"] is MODELS_CONFIG_MAP["Mamba2ForCausalLM"]


def test_requests() -> None:
    assert tokens_input([1, 2])["prompt_token_ids"] == [1, 2]
    params = vllm.PoolingParams(task="token_classify", extra_kwargs={"supervised": [[1, 2]]})
    assert params.clone().extra_kwargs == {"supervised": [[1, 2]]}


def test_poolers() -> None:
    assert {"get_supported_tasks", "get_pooling_updates", "forward"} <= set(dir(Pooler))
    assert PoolingParamsUpdate(requires_token_ids=True).requires_token_ids
    assert hasattr(VllmModelForPooling, "is_pooling_model")
    assert PoolingStates().hidden_states_cache == []
    assert {"get_pooling_cursor", "get_prompt_token_ids_cpu"} <= set(dir(PoolingMetadata))
    assert {"seq_lens_cpu", "num_scheduled_tokens_cpu"} <= set(PoolingCursor.__annotations__)
    assert callable(PoolingCursor.get_finished_mask)


def test_engines() -> None:
    assert callable(EngineCoreClient.shutdown)
    assert {"additional_config", "hf_overrides", "runner", "device_ids"} <= set(
        inspect.signature(vllm.EngineArgs).parameters
    )
    assert torch.float32 in vllm.platforms.current_platform.supported_dtypes
