"""Parts of tests of completions with several turns: a tokenizer with whole calls as tokens, and an environment."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.rollout_runs import rollout_settings

CALLS = [
    *(f'<tool_call>{{"name": "open_door", "arguments": {{"hand": {hand}}}}}</tool_call>' for hand in range(12)),
    '<tool_call>{"name": "no_such", "arguments": {}}</tool_call>',
    '<tool_call>{"name": ',
]
ENDS = [f"<end{number}>" for number in range(14)]
"""Several, as of calls, so that a model that was drawn makes short turns, of which half have calls."""
TOKENS = [*ENDS, "\ufffd", "<user>", "<assistant>", "<result>", "<tools>", *CALLS, *map(chr, range(32, 127))]
VOCABULARY = 128
assert len(TOKENS) == VOCABULARY, len(TOKENS)
TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}<user>{{ message.content }}"
    "{%- elif message.role == 'tool' %}<result>{{ message.content }}"
    "{%- else %}<assistant>{{ message.content }}"
    "{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end0>"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{% endif %}"
)
ENVIRONMENT = '''
import json
import os
import signal
import time


class Door:
    def __init__(self):
        self.opened = 0

    def reset(self, number, **columns):
        self.opened, self.number = 0, number
        if columns.get("fault") == "reset":
            raise RuntimeError("no door is there")
        return "abc" if number % 3 == 0 else None

    def open_door(self, hand: int) -> str:
        """Opens the door.

        Args:
            hand: Which one.
        """
        self.opened += 1
        return f"{self.number}{hand}"

    def get_reward(self):
        return float(self.opened > 0)


def open_door(hand: int) -> str:
    """Opens a door.

    Args:
        hand: Which one.
    """
    return f"{hand}1"
'''


def write_tool_tokenizer(folder: Path) -> None:
    """Writes it in place of the tokenizer of a model with so many tokens."""
    tokenizer = Tokenizer(models.WordLevel({one: number for number, one in enumerate(TOKENS)}, unk_token="\ufffd"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens(ENDS)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in TOKENS if len(one) > 1 and one not in ENDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ENDS[0], "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def tool_settings(folder: Path, **changes: object) -> dict[str, object]:
    """Options of a run whose model may open a door, by their names; those of `changes` with __ for the point."""
    settings = rollout_settings(folder)
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    ends = list(range(len(ENDS)))
    config |= {"vocab_size": VOCABULARY, "eos_token_id": ends, "max_position_embeddings": 128}
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tool_tokenizer(folder / "model")
    (folder / "env.py").write_text(ENVIRONMENT, encoding="utf-8")
    prompts = [
        {"prompt": [{"role": "user", "content": text}], "number": number}
        for number, text in enumerate("0123456789abcdef")
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts), encoding="utf-8")
    settings |= {
        "data.seq_length": 64, "rollout.max_completion_length": 24, "rollout.environment": f"{folder}/env.py:Door",
        "rollout.rewards": "environment", "rollout.environment_workers": 4,
    }  # fmt: skip
    del settings["rollout.reward_weights"]
    return settings | {name.replace("__", "."): value for name, value in changes.items()}
