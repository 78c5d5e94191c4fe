"""Targets inside vLLM: the statistics are computed where the logits are, and only they come out.

plugin    what vLLM loads in each of its processes: sfdd's architectures
models    those architectures: a model of vLLM's, plus the pooler
pooler    hidden states -> statistics, on every step of the engine
private   names that vLLM does not promise to keep
engine    settings -> a running engine, or a sentence that says why not
backend   conversations in, statistics out
"""
