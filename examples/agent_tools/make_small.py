"""A tiny Llama whose chat template has tools, conversations of a careless teacher, and doors to open.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json and tokenizer), FOLDER/taught.jsonl (conversations for the supervised start, of which
one in four opens its door) and FOLDER/prompts.jsonl (ten doors with every code of two digits; the code is a column for
the environment, which the model never sees).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

END, UNKNOWN = "<|im_end|>", "<|unknown|>"
PIECES = ["<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '{"name": "',
    '", "arguments": {', '"code": "', "read_note", "open_door", "system", "user", "assistant", "Tools: ", "Open door ",
    "It opens.", "It stays shut.", "It is open.", "I cannot open it."]  # fmt: skip
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
TOKENS = [END, UNKNOWN, *PIECES, *CHARACTERS]
VOCABULARY = 128
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + tools | map(attribute='function.name') | join(', ') + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CODES = [f"{code:02d}" for code in range(100)]
DOORS = 10
Messages = list[dict[str, Any]]


def write_model(folder: Path) -> None:
    """config.json, and a tokenizer of characters and of the pieces of a call."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({one: number for number, one in enumerate(TOKENS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in PIECES])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def question(door: int) -> Messages:
    """Returns the prompt of a door."""
    return [{"role": "user", "content": f"Open door {door}."}]


def taught(door: int, code: str, how: str, typed: str) -> Messages:
    """Returns a conversation of the teacher, which describes the tools as the template does.

    Args:
        door: its number.
        code: on the note.
        how: "reads" the note first, or "guesses"; anything else gives up.
        typed: code that is tried.
    """
    messages: Messages = [{"role": "system", "content": "Tools: open_door, read_note"}, *question(door)]
    if how == "reads":
        messages += _called("read_note", {}, code)
    if how not in ("reads", "guesses"):
        return [*messages, {"role": "assistant", "content": "I cannot open it."}]
    opens = typed == code
    messages += _called("open_door", {"code": typed}, "It opens." if opens else "It stays shut.")
    return [*messages, {"role": "assistant", "content": "It is open." if opens else "I cannot open it."}]


def _called(name: str, arguments: dict[str, str], result: str) -> Messages:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
    ]


def write_doors(folder: Path) -> None:
    """The doors, and four conversations of the teacher about each: one reads the note and types its code, one reads it
    and types another, one guesses, and one gives up."""
    draw = random.Random(1)
    prompts, conversations = [], []
    for door, code in itertools.product(range(DOORS), CODES):
        prompts.append({"prompt": question(door), "code": code})
        guesses = draw.sample([one for one in CODES if one != code], 2)
        for how, typed in (("reads", code), ("reads", guesses[0]), ("guesses", guesses[1]), ("gives up", "")):
            conversations.append({"messages": taught(door, code, how, typed)})
    draw.shuffle(prompts)
    for name, records in (("taught", conversations), ("prompts", prompts)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_model(arguments.out / "model")
    write_doors(arguments.out)
