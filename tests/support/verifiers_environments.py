"""Two environments of the package verifiers for tests, written as packages beside the run, with a harness that asks
from the process of the agent, since one that starts a program for each conversation takes seconds."""

from __future__ import annotations

from pathlib import Path

_HARNESS = '''
from difflib import SequenceMatcher

import httpx
import verifiers.v1 as vf


class AskConfig(vf.HarnessConfig):
    pass


class AskHarness(vf.Harness[AskConfig]):
    """Asks once, and again where the task has a second question."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=60) as client:
            for then in (*data.then, None):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
                if then is not None:
                    messages.append({"role": "user", "content": then})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Data(vf.TaskData):
    answer: str
    then: list[str] = []
'''
REVERSE = (
    _HARNESS
    + '''

class ReverseTask(vf.Task[Data]):
    @vf.reward
    async def overlap(self, trace: vf.Trace) -> float:
        """How similar the answer and the reversed text are."""
        return SequenceMatcher(None, trace.messages[-1].content or "", self.data.answer).ratio()


class ReverseTaskset(vf.Taskset[ReverseTask]):
    def load(self):
        for text in ("ab", "ba", "aa", "bb"):
            yield ReverseTask(Data(prompt=text, answer=text[::-1]), self.config.task)


__all__ = ["AskHarness", "ReverseTaskset"]
'''
)
ONES = (
    _HARNESS
    + '''

class OnesTask(vf.Task[Data]):
    @vf.reward
    async def ones(self, trace: vf.Trace) -> float:
        """The number of ones in both answers, up to six."""
        said = "".join(one.content or "" for one in trace.messages if one.role == "assistant")
        return min(said.count("1"), 6) / 6

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(sum(len(one.content or "") for one in trace.messages if one.role == "assistant"))


class OnesTaskset(vf.Taskset[OnesTask]):
    def load(self):
        for letter in "abcd":
            yield OnesTask(Data(prompt=letter, answer="1", then=["x"]), self.config.task)


__all__ = ["AskHarness", "OnesTaskset"]
'''
)
OPTIONS = """
[env.taskset]
id = "{name}"
[env.agent.runtime]
type = "subprocess"
"""


def write_environments(folder: Path) -> None:
    """Writes both packages, and for each a file with its options."""
    for name, text in (("rankfold_reverse", REVERSE), ("rankfold_ones", ONES)):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text, encoding="utf-8")
        (folder / f"{name}.toml").write_text(OPTIONS.format(name=name), encoding="utf-8")
