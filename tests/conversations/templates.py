"""Small chat templates with the behaviour of well-known families, and tokenizers for them.

Written for these tests: each has its family's marks and habits (what it trims, refuses, injects or
forgets), not its wording.
"""

from collections.abc import Sequence
from itertools import groupby

from conftest import CHATML, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from sfdd.conversations.conversation import TokenizedConversation

LLAMA3 = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if m.role == 'tool' else m.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.first %}{{- 'Functions: ' + (tools | tojson) + '\\n\\n' }}{% endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

QWEN25 = """
{%- if messages[0].role != 'system' or tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are a small test.' }}
    {%- if tools %}{{- '\\n<tools>' }}{% for t in tools %}{{- '\\n' + (t | tojson) }}{% endfor %}
        {{- '\\n</tools>' }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- set before = messages[loop.index0 - 1].role if not loop.first else '' %}
        {%- if before != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role != 'system' or not (loop.first and tools) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# Keeps the thought of answers after the last question only; writes an empty one into a last answer.
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content or '' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{% endif %}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('system role not supported') }}
    {%- elif m.role == 'user' %}
        {%- if not loop.first and messages[loop.index0 - 1].role == 'user' %}
            {{ raise_exception('roles must alternate user/assistant') }}{% endif %}
        {%- if tools and loop.first %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is undefined or call.id | length != 9 %}
                {{ raise_exception('call ids have 9 characters') }}{% endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""

PHI = """
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% else %}{{- eos_token }}{% endif %}
"""

# Never writes a thought, but begins one for the target; takes the arguments of a call as text only.
R1 = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}
    {%- elif m.tool_calls %}
        {{- '<|Assistant|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|call|>' + call.function.name + '\\n' + call.function.arguments + '<|end|>' }}
        {%- endfor %}{{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- else %}{{- '<|' + m.role + '|>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}
"""

MARKED = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content + '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}{{- m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
# template, special tokens, BOS, EOS
_FAMILIES = {
    "chatml": (CHATML, _CHATML_MARKS, "<|im_start|>", "<|im_end|>"),
    "marked": (MARKED, _CHATML_MARKS, "<|im_start|>", "<|im_end|>"),
    "llama3": (LLAMA3, _HEADERS, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2.5": (QWEN25, _CHATML_MARKS, None, "<|im_end|>"),
    "qwen3": (QWEN3, _CHATML_MARKS, None, "<|im_end|>"),
    "mistral": (MISTRAL, _INST, "<s>", "</s>"),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<end_of_turn>"),
    "phi": (PHI, ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), None, "<|endoftext|>"),
    "r1": (R1, ("<|bos|>", "<|User|>", "<|Assistant|>", "<|eos|>"), "<|bos|>", "<|eos|>"),
}
FAMILIES = tuple(_FAMILIES)


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer with the special tokens and the template of a family."""
    template, special_tokens, bos, eos = _FAMILIES[name]
    return byte_tokenizer(template, special_tokens, bos, eos)


def bracketed(
    tokenizer: PreTrainedTokenizerFast, samples: Sequence[TokenizedConversation]
) -> list[str]:
    """The text of every sample, its supervised stretches in brackets."""
    texts = []
    for sample in samples:
        pairs = zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True)
        texts.append("")
        for supervised, run in groupby(pairs, key=lambda pair: pair[0]):
            text = tokenizer.decode([i for _, i in run])
            texts[-1] += f"⟦{text}⟧" if supervised else text
    return texts
