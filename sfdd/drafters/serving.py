"""Which targets vLLM serves with a drafter: not all of those that sfdd can train one for.

Read from vLLM 0.32: `SupportsEagle3` in its models, which gpu_model_runner.py asks for, and
`_maybe_share_embeddings` and `_maybe_share_lm_head` in v1/spec_decode/llm_base_proposer.py. Families that
are not named here have a model there that supports EAGLE-3, or run through transformers, which does; of
what reads more than text, only the Gemmas are known.
"""


def _families(names: str) -> frozenset[str]:
    """By transformers' `model_type`."""
    return frozenset(names.split())


# Those whose models in vLLM do not hand on the hidden states of their layers, ...
_NO_STATES = _families(
    """axk1 cohere cohere2 ernie4_5_moe exaone4 exaone_moe falcon_h1 gemma gemma2 gemma3 gemma3_text
    gemma3n gemma3n_text glm4 glm4_moe glm4_moe_lite granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared hrm_text hy_v3 hy_v4 hyperclovax inkling_text internlm2 jamba lfm2 lfm2_moe
    longcat_flash mixtral nemotron olmo_hybrid olmoe opt phimoe qwen2_moe qwen4_exp qwen4_exp_text
    sarvam_moe stablelm zamba2"""
)
# ... have no `lm_head`, which EAGLE's drafters share, ...
_NO_HEAD = _families("cohere cohere2 cohere2_moe gemma2 gemma3n gemma3n_text internlm2")
# ... or no `model.embed_tokens`, which all drafters share.
_NO_EMBEDDINGS = _families(
    "bloom dbrx falcon falcon_mamba gpt-sw3 gpt2 gpt_neox gptj internlm2 mamba mamba2 opt"
)


def why_not_served(method: str, model_type: str) -> str | None:
    """Why vLLM would not serve a drafter with targets of a family, in one sentence; None where it would.

    Args:
        method: "eagle" or "eagle3".
        model_type: of the target's text model, as transformers calls it.
    """
    reasons = {m: _reason(m, model_type) for m in ("eagle", "eagle3")}
    if not (reason := reasons[method]):
        return None
    other = next((m for m, missing in reasons.items() if not missing), None)
    instead = f"train one with --method {other}" if other else "use another target or engine"
    return (
        f"vLLM 0.32 cannot serve {method} drafters for {model_type} targets: {reason}; {instead}."
    )


def _reason(method: str, model_type: str) -> str | None:
    if model_type in _NO_EMBEDDINGS:
        return "it does not find the embeddings of such a target, which a drafter shares"
    if method == "eagle3" and model_type in _NO_STATES:
        return "its model of such a target does not hand on the hidden states of inner layers"
    if method == "eagle" and model_type in _NO_HEAD:
        return "its model of such a target has no lm_head, which an eagle drafter shares"
    return None
