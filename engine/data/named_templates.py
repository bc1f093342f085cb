"""Chat templates by name, for models that have none.

They write the formats of released models, without descriptions of tools. Conversations may have any order of roles that
the format can express. A template that ends answers with the end token refuses a tokenizer that has none.
"""

from __future__ import annotations

from pathlib import Path

from engine.data.chat import ALPACA_TASK
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.refusals import shown

_END_TOKEN = "eos_token or raise_exception('it ends answers with the end token, and the tokenizer has none')"
_WRONG_ROLE = "raise_exception('this format has no turns of ' + message.role)"
_FIRST_SYSTEM = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
"""
"""A template's beginning for formats that have a place for one system message only."""

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_LLAMA2 = (
    _FIRST_SYSTEM
    + """\
{%- set ns = namespace(system='<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system else '') %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- bos_token }}{{ '[INST] ' + (ns.system + message.content) | trim + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + ' ' }}{{ @END@ }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- @ROLE@ }}
    {%- endif %}
{%- endfor %}
"""
)

_MISTRAL = (
    _FIRST_SYSTEM
    + """\
{{- bos_token }}
{%- set ns = namespace(system=system + '\\n\\n' if system else '') %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + ns.system + message.content + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim }}{{ @END@ }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- @ROLE@ }}
    {%- endif %}
{%- endfor %}
"""
)

_GEMMA = (
    _FIRST_SYSTEM
    + """\
{{- bos_token }}
{%- set ns = namespace(system=system + '\\n\\n' if system else '') %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<start_of_turn>user\\n' + ns.system + message.content | trim + '<end_of_turn>\\n' }}
        {%- set ns.system = '' %}
    {%- elif message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' + message.content | trim + '<end_of_turn>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- @ROLE@ }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
)

_PHI3 = """\
{%- for message in messages %}
    {%- if message.role in ['system', 'user', 'assistant'] %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
    {%- else %}
        {{- @ROLE@ }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- else %}
    {{- eos_token }}
{%- endif %}
"""

_ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content }}{{ @END@ }}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""

_VICUNA = (
    _FIRST_SYSTEM
    + """\
{{- bos_token }}
{{- (system or 'A chat between a curious user and an artificial intelligence assistant. '
     'The assistant gives helpful, detailed, and polite answers to the user\\'s questions.') + ' ' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'USER: ' + message.content + ' ' }}
    {%- elif message.role == 'assistant' %}
        {{- 'ASSISTANT: ' + message.content }}{{ @END@ }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- @ROLE@ }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT:' }}
{%- endif %}
"""
)

_ALPACA = (
    _FIRST_SYSTEM
    + """\
{{- bos_token }}{{ (system or '@TASK@') + '\\n\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '### Instruction:\\n' + message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '### Response:\\n' + message.content }}{{ @END@ }}{{ '\\n\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- @ROLE@ }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '### Response:\\n' }}
{%- endif %}
"""
)

# an answer may call tools, whose results come as a user's turn
_QWEN_CALLS = """\
{%- macro calls(tool_calls, content) %}
    {%- for call in tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '\\n' if content or not loop.first }}
        {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""

_QWEN_TOOL = """\
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""

_QWEN25 = (
    _QWEN_CALLS
    + """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}{{ calls(message.tool_calls, message.content) }}
        {{- '<|im_end|>\\n' }}
"""
    + _QWEN_TOOL
    + "{%- endif %}\n"
)

_QWEN3 = (
    _QWEN_CALLS
    + """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '\\n' + content }}
        {%- endif %}
        {{- calls(message.tool_calls, content) }}{{ '<|im_end|>\\n' }}
"""
    + _QWEN_TOOL
    + """\
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""
)


def _filled(template: str) -> str:
    for name, text in (("@END@", _END_TOKEN), ("@ROLE@", _WRONG_ROLE), ("@TASK@", ALPACA_TASK)):
        template = template.replace(name, text)
    return template


TEMPLATES = {
    "chatml": _CHATML,
    "llama2": _filled(_LLAMA2),
    "llama3": _LLAMA3,
    "mistral": _filled(_MISTRAL),
    "gemma": _filled(_GEMMA),
    "phi3": _filled(_PHI3),
    "qwen2.5": _QWEN25,
    "qwen3": _QWEN3,
    "zephyr": _filled(_ZEPHYR),
    "vicuna": _filled(_VICUNA),
    "alpaca": _filled(_ALPACA),
}


def template_text(name: str) -> str:
    """Returns the text of the template with this name, or in this file.

    Raises:
        UserError: it is neither, or the file cannot be read.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    known = ", ".join(TEMPLATES)
    if not path.is_file():
        raise UserError(
            f"data.chat_template is {shown(name)!r}, which is no file and no name of a template: give a file, or one "
            f"of {known}."
        )
    text = read_text(path, f"give another chat template, or one of {known}")
    if not text.strip():
        raise UserError(
            f"{shown(path)} is empty, but a chat template was expected: give another one, or one of {known}."
        )
    return text
