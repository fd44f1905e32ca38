"""What READMEs tell their readers to type: fenced blocks, and commands in the text and in tables.

The first word behind a fence is its language: `python` is run, all blocks of a README as one
program; `sh` is run as one script; of `console`, lines that start with `$ ` are run, the others are
their output; `text` is not run. Words that may follow:

    slow   takes minutes: the test is marked slow
    aot    needs this extra, which the text before must have asked for
    ci     sets up an environment, or takes ten minutes: each command is a line of .ci/run, which
           runs it in a clean clone
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LANGUAGES = ("python", "sh", "console", "text")
WORDS = ("slow", "aot", "ci")
# What scripts start; they pass on their arguments.
STARTED_BY = {
    "scripts/run.sh": "experiments.serve",
    "scripts/gpu_check.sh": "experiments.kernels.gpu_check",
}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    readme: str  # path in the repository
    line: int  # of its fence
    language: str
    words: tuple[str, ...]
    text: str
    before: str  # the README up to the block

    def __str__(self) -> str:
        return f"{self.readme}:{self.line}"

    @property
    def script(self) -> str:
        """What is typed."""
        if self.language == "console":
            typed = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
            return "\n".join(typed)
        return self.text

    @property
    def commands(self) -> list[str]:
        """Its lines without comments."""
        lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in self.script.splitlines())
        return [line for line in lines if line]


def readmes() -> list[str]:
    """The Markdown files under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


def blocks() -> list[Block]:
    """The fenced blocks of all READMEs."""
    found = []
    for readme in readmes():
        text = (ROOT / readme).read_text()
        for fence in re.finditer(r"^```(.*)\n((?s:.*?))^```$", text, flags=re.MULTILINE):
            language, *words = fence[1].split() or [""]
            before = text[: fence.start()]
            line = before.count("\n") + 1
            found.append(Block(readme, line, language, tuple(words), fence[2], before))
    return found


def commands_in_text() -> list[list[str]]:
    """Commands in backticks that start an experiment: its module and its flags."""
    found = []
    for readme in readmes():
        text = (ROOT / readme).read_text()
        text = re.sub(r"^```.*\n(?s:.*?)^```$", "", text, flags=re.MULTILINE)
        prefix = ""
        for line in text.splitlines():
            # A table whose first heading is how all its commands begin.
            if heading := re.match(r"\| `python -m (experiments[\w.]*\.)` \|", line):
                prefix = heading[1]
            elif not line.startswith("|"):
                prefix = ""
            elif prefix and not line.startswith("|--"):
                spans = re.findall(r"`([^`]+)`", line.split("|")[1])
                found += [shlex.split(prefix + span) for span in spans]
        for span in re.findall(r"`((?:python|scripts/)[^`]+)`", text):
            match shlex.split(span):
                case ["python", "-m", module, *flags] if not module.endswith("."):
                    found.append([module, *flags])
                case [script, *flags] if script in STARTED_BY:
                    found.append([STARTED_BY[script], *flags])
    return [[word for word in command if word != "--help"] for command in found]
