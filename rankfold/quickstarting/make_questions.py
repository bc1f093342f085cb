"""Questions and answers made from the text, as prompt and completion records.

    python -m rankfold.quickstarting.make_questions --out FOLDER

writes FOLDER/train.jsonl and FOLDER/validation.jsonl. Every answer stands in the text word for word. All records made
from one paragraph go to the same file, so no validation answer is trained on under another question; the base model
has read all of the text.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from engine.config.command_line import CommandLine
from rankfold.quickstarting.reference_text import Section, is_prose, read_sections, read_topics

VALIDATION_PERCENT = 10
MIN_ANSWER, MAX_ANSWER = 30, 320
"""Characters."""
MAX_TERMS = 2
"""Questions about quoted terms, at most, for each sentence."""

SENTENCE_END = re.compile(r"(?<=[.:])\s+(?=[A-Z(\"*])")
TERM = re.compile(r"\"([A-Za-z_][\w.]*(?:\(\))?)\"")
ENTRY = re.compile(r"^(?:class |async )?([A-Za-z_][\w.]*)\(")
NOTE = ("New in version", "Changed in version", "Deprecated since", "See also", "Note", "Warning")

Record = dict[str, str]


def records_of(section: Section) -> Iterator[tuple[str, Record]]:
    """(paragraph, record) for each question that the section answers."""
    title = section.title
    entry = ""
    is_first = True
    for paragraph in section.paragraphs:
        if match := ENTRY.match(paragraph):
            entry = match[1]
            continue
        if not is_prose(paragraph) or "\n" in paragraph or paragraph.lstrip().startswith(NOTE):
            continue
        text = paragraph.strip()
        if paragraph.startswith("   ") and entry:
            yield from _asked(paragraph, text, f"What does {entry}() do?", f"Explain {entry}() in Python.")
            entry = ""
        elif is_first and title:
            about = f"What does Python's reference say about {title}?"
            yield from _asked(paragraph, text, about, f"Explain the topic: {title}.")
        is_first = False
        for sentence in SENTENCE_END.split(text):
            for term in list(dict.fromkeys(TERM.findall(sentence)))[:MAX_TERMS]:
                where = f" under {title}" if title else ""
                yield from _asked(paragraph, sentence, f'What does Python\'s reference say about "{term}"{where}?')


def _asked(paragraph: str, text: str, *questions: str) -> Iterator[tuple[str, Record]]:
    answer = ""
    for sentence in SENTENCE_END.split(text):
        if answer and len(answer) + len(sentence) > MAX_ANSWER:
            break
        answer = f"{answer} {sentence}".strip()
    if MIN_ANSWER <= len(answer) <= MAX_ANSWER and answer.endswith("."):
        for question in questions:
            yield paragraph, {"prompt": f"Question: {question}\nAnswer:", "completion": answer}


def make_records(sections: list[Section]) -> tuple[list[Record], list[Record]]:
    """Training and validation records, each prompt once."""
    parts: tuple[list[Record], list[Record]] = ([], [])
    asked: set[str] = set()
    for section in sections:
        for paragraph, record in records_of(section):
            if record["prompt"] not in asked:
                asked.add(record["prompt"])
                # a checksum of the paragraph, because Python's own hash of a text differs from run to run
                is_validation = zlib.crc32(" ".join(paragraph.split()).encode()) % 100 < VALIDATION_PERCENT
                parts[is_validation].append(record)
    training, validation = parts
    learnt = "\n".join(record["completion"] for record in training)
    # some sentences stand in two paragraphs
    return training, [record for record in validation if record["completion"] not in learnt]


def main() -> None:
    parser = CommandLine(description="Write question and answer records made from the text.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    training, validation = make_records(read_sections(read_topics()))
    for name, records in (("train", training), ("validation", validation)):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"questions: {len(training)} to train on, {len(validation)} held out")


if __name__ == "__main__":
    main()
