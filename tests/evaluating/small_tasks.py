"""A tiny model with a tokenizer that puts a token in front, and tasks of each kind on local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALL = ("tiny_choice", "tiny_letters", "tiny_answer", "tiny_text", "tiny_last")
_TEXT = "the cat sat on a mat and saw the moon above an old red barn near green water where nine birds sing"
WORDS = _TEXT.split()


def write_model(folder: Path, *, context: int = 96, seed: int = 3) -> Path:
    """Writes a Llama of 2 layers whose vocabulary is bytes and some pairs; its weights are sharp enough that greedy
    texts do not hang on the last bit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", model_max_length=context
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _sentence(start: int, length: int) -> str:
    return " ".join(WORDS[(start * 7 + 3 * place) % len(WORDS)] for place in range(length))


def write_tasks(folder: Path) -> Path:
    """Writes tiny_choice (multiple_choice, two examples), tiny_letters (choices of one token), tiny_answer
    (generate_until), tiny_text (loglikelihood_rolling, longer than the context) and tiny_last (loglikelihood)."""
    folder.mkdir()
    choices = [
        {
            "question": _sentence(n, 3 + n % 4),
            "options": [f"{_sentence(n + k, 1 + k)}." for k in range(4)],
            "gold": n % 4,
        }
        for n in range(10)
    ]
    _task(folder, "tiny_choice", choices, output_type="multiple_choice", num_fewshot=2, fewshot_split="train",
          doc_to_text="Q: {{question}}\nA:", doc_to_choice="{{options}}", doc_to_target="gold",
          metric_list=_metrics(acc="mean", acc_norm="mean"))  # fmt: skip
    _task(folder, "tiny_letters", choices, output_type="multiple_choice", doc_to_text="{{question}}\n",
          doc_to_choice=["a", "b", "c", "d"], target_delimiter="", doc_to_target="gold",
          metric_list=_metrics(acc="mean"))  # fmt: skip
    _task(folder, "tiny_answer", choices, output_type="generate_until", num_fewshot=1, fewshot_split="train",
          doc_to_text="Q: {{question}}\nA:", doc_to_target="{{options[gold]}}",
          generation_kwargs={"until": ["\n", "e", "."], "max_gen_toks": 12},
          metric_list=_metrics(exact_match="mean"))  # fmt: skip
    texts = [{"text": _sentence(n, 2 + 90 * (n % 3))} for n in range(5)]
    _task(folder, "tiny_text", texts, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="text",
          metric_list=_metrics(word_perplexity="weighted_perplexity", bits_per_byte="bits_per_byte"))  # fmt: skip
    long = [{"text": _sentence(n, 4 + 150 * (n % 2)), "last": WORDS[n]} for n in range(6)]
    _task(folder, "tiny_last", long, output_type="loglikelihood", doc_to_text="{{text}}",
          doc_to_target="{{' ' + last}}", metric_list=_metrics(acc="mean", perplexity="perplexity"))  # fmt: skip
    return folder


def _metrics(**names: str) -> list[dict[str, Any]]:
    lower = ("perplexity", "word_perplexity", "bits_per_byte")
    return [{"metric": name, "aggregation": how, "higher_is_better": name not in lower} for name, how in names.items()]


def _task(folder: Path, name: str, documents: list[dict[str, Any]], **settings: Any) -> None:
    import yaml

    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in documents), encoding="utf-8")
    files = {"train": str(data), "test": str(data)}
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **settings,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def write_adapter(model: Path, folder: Path) -> Path:
    """Writes an adapter by PEFT that changes the model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(11)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained.save_pretrained(folder)
    return folder
