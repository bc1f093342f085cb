"""Training forms of well-known chat templates, which mark the assistant's text.

A training form is the template itself with a few changes: marks around what the assistant wrote, and, where the
template would render earlier turns differently (without their reasoning), all turns alike. The targets are then those
of TRL's trainers with the same template and `assistant_only_loss`: the answer, what ends its turn
and the line break after that; with Qwen3's templates also the empty block of reasoning, before every answer.

Templates are recognised by the places that change, so that one with another system prompt is recognised too. A change
is written as the text that is replaced and what takes its place. ⟦ and ⟧ stand for the marks, and ⟪ and ⟫ for
expressions that are the marks where the message is the assistant's and empty elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks in a rendered text. Unicode reserves these code points as noncharacters, so no text contains them."""

Change = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Form:
    """The changes to the templates of one family.

    Args:
        changes: each text must be in the template, or it is another template. All its places are changed.
        within: the text that begins, and the one that ends, the part of the template in which the changes are made;
            both are outside of it. The template as a whole where it is None.
        more: further changes, in the whole template.
    """

    changes: tuple[Change, ...]
    within: tuple[str, str] | None = None
    more: tuple[Change, ...] = ()

    def applied(self, template: str) -> str | None:
        """Returns the template with the changes, or None where it is not one of this family."""
        before, part, behind = "", template, ""
        if self.within is not None:
            before, first, rest = template.partition(self.within[0])
            part, last, behind = rest.partition(self.within[1])
            if not (first and last):
                return None
            before, behind = before + first, last + behind
        changed = _changed(part, self.changes)
        return None if changed is None else _changed(before + changed + behind, self.more)


def _changed(text: str, changes: tuple[Change, ...]) -> str | None:
    for old, new in changes:
        if old not in text:
            return None
        text = text.replace(old, _with_marks(new))
    return text


def _with_marks(new: str) -> str:
    for short, mark in (("⟪", "⟦"), ("⟫", "⟧")):
        new = new.replace(short, f"('{mark}' if message['role'] == 'assistant' else '')")
    return new.replace("⟦", BEGIN).replace("⟧", END)


_IM_END = (r"'<|im_end|>\n' }}", r"'<|im_end|>\n⟧' }}")

_QWEN = ('elif message.role == "assistant" %}', '{%- elif message.role == "tool" %}')
_ALL_REASONING = (("loop.index0 > ns.last_query_index", "true"), (r"'\n<think>", r"'\n⟦<think>"), _IM_END)
_QWEN_FORMS = (
    # 3, by its name here
    Form(
        within=('if message.role == "assistant" %}', _QWEN[1]),
        changes=(("loop.index0 > ns.last_query and (loop.last or reasoning)", "true"), *_ALL_REASONING[1:2]),
        more=((r"{{ '<|im_end|>\n' }}", r"{{ '<|im_end|>\n⟧' }}"),),
    ),
    # 3
    Form(within=_QWEN, changes=(("loop.last or (not loop.last and reasoning_content)", "true"), *_ALL_REASONING)),
    # 3.5, 3.6, 3.8
    Form(within=_QWEN, changes=_ALL_REASONING),
    # 3 instruct, 3-VL
    Form(within=_QWEN, changes=((r"message.role + '\n' + content }}", r"message.role + '\n⟦' + content }}"), _IM_END)),
    Form(within=_QWEN, changes=((r"message.role + '\n' }}", r"message.role + '\n⟦' }}"), _IM_END)),
    # 2.5, 2.5-VL
    Form(
        within=_QWEN,
        changes=(("'<|im_start|>' + message.role }}", "'<|im_start|>' + message.role + '⟦' }}"), _IM_END),
        more=(
            (
                r"message.role + '\n' + message.content + '<|im_end|>' + '\n' }}",
                r"message.role + ⟪ + '\n' + message.content + '<|im_end|>' + '\n' + ⟫ }}",
            ),
        ),
    ),
    Form(
        changes=(
            ("<|im_start|>{{ message['role'] }}\n", "<|im_start|>{{ message['role'] }}\n{{ ⟪ }}"),
            ("<|im_end|>\n{% else %}{%", "<|im_end|>\n{{ ⟫ }}{% else %}{%"),
            ("<|im_end|>\n{% endif %}{% endfor", "<|im_end|>\n{{ ⟫ }}{% endif %}{% endfor"),
        )
    ),
)

_NEMOTRON = Form(
    within=('if message.role == "assistant" %}', '{%- elif message.role == "user"'),
    changes=(
        (r"'<|im_start|>assistant\n<|im_end|>\n' }}", r"'<|im_start|>assistant\n⟦<|im_end|>\n⟧' }}"),
        (r"'<|im_start|>assistant\n' ~", r"'<|im_start|>assistant\n⟦' ~"),
        (r"'<|im_start|>assistant\n' }}", r"'<|im_start|>assistant\n⟦' }}"),
        _IM_END,
    ),
)

_LFM_END = (r'{{- content + "<|im_end|>\n" -}}', r'{{- ⟪ + content + "<|im_end|>\n" + ⟫ -}}')
_LFM_FORMS = (
    Form(
        changes=(
            ('message.get("tool_calls") -%}', "message.get(\"tool_calls\") -%}{{- '⟦' -}}"),
            (r'{{- "<|im_end|>\n" -}}', r'{{- "<|im_end|>\n⟧" -}}'),
            _LFM_END,
        )
    ),
    Form(within=('"<|im_start|>" + message["role"]', "add_generation_prompt"), changes=(_LFM_END,)),
)

_GEMMA_FORMS = (
    Form(
        changes=(
            (
                "' + message['content'] | trim + '<end_of_turn>\n' }}",
                "' + ⟪ + message['content'] | trim + '<end_of_turn>\n' + ⟫ }}",
            ),
        )
    ),
    Form(
        within=("{%- for message in loop_messages -%}", "{%- endfor -%}\n{%- if add_generation_prompt"),
        changes=(
            ('(first_user_prefix if loop.first else "") }}', '(first_user_prefix if loop.first else "") + ⟪ }}'),
            ("{{ '<end_of_turn>\n' }}", "{{ '<end_of_turn>\n' + ⟫ }}"),
        ),
    ),
    # DiffusionGemma: tool results are within a turn
    Form(
        within=("thinking_text and thinking_gate -%}", "add_generation_prompt"),
        changes=(
            (
                r"'<|channel>thought\n' + thinking_text + '\n<channel|>'",
                r"'⟦<|channel>thought\n' + thinking_text + '\n<channel|>⟧'",
            ),
            ("'<|tool_call>call:'", "'⟦<|tool_call>call:'"),
            ("'}<tool_call|>'", "'}<tool_call|>⟧'"),
            ("{{- captured_content -}}", "{{- ⟪ + captured_content + ⟫ -}}"),
            (r"'<turn|>\n'", r"⟪ + '<turn|>\n' + ⟫"),
        ),
    ),
)

_LLAMA = Form(
    changes=(
        ("+ message['content'] | trim + '<|eot_id|>' %}", "+ ⟪ + message['content'] | trim + '<|eot_id|>' + ⟫ %}"),
    )
)

_PHI = Form(
    changes=(
        (
            "'<|assistant|>\n' + message['content'] + '<|end|>\n'",
            "'<|assistant|>\n⟦' + message['content'] + '<|end|>\n⟧'",
        ),
        (
            "{% else %}{{ eos_token }}{% endif %}",
            "{% elif messages[-1]['role'] == 'assistant' %}{{ '⟦' + eos_token + '⟧' }}"
            "{% else %}{{ eos_token }}{% endif %}",
        ),
    )
)

_COHERE_FORMS = (
    Form(
        changes=(
            (
                "<|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>'",
                "<|CHATBOT_TOKEN|>⟦' + content.strip() + '<|END_OF_TURN_TOKEN|>⟧'",
            ),
        )
    ),
    Form(
        changes=(
            ("<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message", "<|CHATBOT_TOKEN|><|START_RESPONSE|>⟦{{ message"),
            ("<|END_OF_TURN_TOKEN|>{% endfor %}", "<|END_OF_TURN_TOKEN|>⟧{% endfor %}"),
        )
    ),
)

_DEEPSEEK_CALLS = (
    ("{%- for tool in message['tool_calls']", "{{ '⟦' }}{%- for tool in message['tool_calls']"),
    (
        "{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}",
        "{{'⟦<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>⟧'}}",
    ),
    (
        "'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'",
        "'⟦<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>⟧'",
    ),
)
_DEEPSEEK_FORMS = (
    # R1's distilled models
    Form(
        changes=(
            *_DEEPSEEK_CALLS,
            ("content.split('</think>')[-1]", "content"),
            (
                "{%- endfor %}{%- endif %}{%- if message['role'] == 'assistant'",
                "{%- endfor %}{{ '⟧' }}{%- endif %}{%- if message['role'] == 'assistant'",
            ),
        )
    ),
    # V3
    Form(
        changes=(
            *_DEEPSEEK_CALLS,
            (
                "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}",
                "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧'}}{%- endif %}",
            ),
            (
                "+ tool['function']['arguments'] +",
                "+ (tool['function']['arguments'] if tool['function']['arguments'] is string else "
                "tool['function']['arguments'] | tojson) +",
            ),
        )
    ),
)

# the header of the next turn ends a turn
_GLM = Form(
    changes=(
        (
            "{% for m in messages %}",
            "{% for m in messages %}"
            "{% set ends = '⟧' if loop.previtem and loop.previtem.role == 'assistant' else '' %}",
        ),
        ("<|user|>\n", "<|user|>{{ ends }}\n"),
        ("{{- '<|observation|>' }}", "{{- '<|observation|>' + ends }}"),
        ("<|observation|>{% for", "<|observation|>{{ ends }}{% for"),
        ("<|system|>\n{{ visible", "<|system|>{{ ends }}\n{{ visible"),
        ("<|assistant|>\n{%- set", "{{ '<|user|>' + ends if ends }}<|assistant|>⟦\n{%- set"),
        (
            "{%- endfor -%}\n{%- if add_generation_prompt -%}",
            "{%- if loop.last and m.role == 'assistant' -%}"
            "{{ ('<|observation|>' if m.tool_calls else '<|user|>') + '⟧' }}"
            "{%- endif -%}{%- endfor -%}\n{%- if add_generation_prompt -%}",
        ),
    )
)

# turns of several messages, whose header names the channel and is written by the model
_GPT_OSS = Form(
    changes=(
        ('{%- if "tool_calls" in message %}', "{{- '⟦' }}{%- if \"tool_calls\" in message %}"),
        ("{%- elif message.role == 'tool' -%}", "{{- '⟧' }}{%- elif message.role == 'tool' -%}"),
    )
)
_MUSE = Form(
    changes=(
        ("{%- elif role == 'assistant' -%}", "{%- elif role == 'assistant' -%}{{- '⟦' -}}"),
        (
            "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}\n        {%- endif -%}",
            "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}{%- endif -%}{{- '⟧' -}}",
        ),
    )
)

# models that also see, on conversations of text
_IDEFICS = Form(
    changes=(
        (
            "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}",
            "{% if message['content'][0]['type'] == 'image' %}{{':' + ⟪}}{% else %}{{':' + ⟪ + ' '}}",
        ),
        ("<end_of_utterance>\n{% endfor %}", "<end_of_utterance>\n{{ ⟫ }}{% endfor %}"),
    )
)
_LLAVA = Form(
    changes=(("' ' + message['content'][0]['text'] + '</s> '", "'⟦ ' + message['content'][0]['text'] + '</s>⟧ '"),)
)

FORMS = (
    *_QWEN_FORMS, _NEMOTRON, *_LFM_FORMS, *_GEMMA_FORMS, _LLAMA, _PHI, *_COHERE_FORMS, *_DEEPSEEK_FORMS, _GLM, _GPT_OSS,
    _MUSE, _IDEFICS, _LLAVA,
)  # fmt: skip


@lru_cache
def training_form(template: str) -> str | None:
    """Returns the training form of a template, which writes BEGIN and END around the targets; None if it is not
    known.
    """
    return next((form for one in FORMS if (form := one.applied(template)) is not None), None)
