"""The report: one HTML file that needs no other, and the same as Markdown."""

import base64
import html
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.costs import length_shapes
from experiments.lib import reporting
from experiments.paper import (
    fig01_capacity,
    fig02_memory_waste,
    fig12_throughput,
    fig13_batched_requests,
    fig14_parallel_and_beam,
    fig18_block_size,
)
from experiments.paper import measured_claims as measured
from experiments.paper.claims import Claim
from experiments.paper.reproduce_plan import Outcome, Step

CLAIMS: dict[str, Callable[[dict[str, Any]], list[Claim]]] = {
    "capacity": fig01_capacity.claims,
    "memory_waste": fig02_memory_waste.claims,
    "throughput": fig12_throughput.claims,
    "batched_requests": fig13_batched_requests.claims,
    "parallel_and_beam": fig14_parallel_and_beam.claims,
    "length_shapes": length_shapes.claims,
    "memory_sharing": measured.memory_sharing,
    "shared_prefix": measured.shared_prefix,
    "chatbot": measured.chatbot,
    "kernel_latency": measured.kernel_latency,
    "decode_step": measured.decode_step,
    "block_size": fig18_block_size.claims,
    "validate_simulator": measured.validate_simulator,
    "preemption": measured.preemption,
    "tail_latency": measured.tail_latency,
    "prefix_hit_rate": measured.prefix_hit_rate,
}
COLUMNS = ("claim", "paper", "here", "verdict", "counts as reproduced")
VERDICTS = ("reproduced", "differs", "not comparable")

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.6rem 0; }
td, th { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
th { background: #f2f2f2; }
img { max-width: 100%; }
code { background: #f2f2f2; padding: 0 0.2rem; }
.reproduced { background: #dff2df; } .differs { background: #f9dcdc; }
.notcomparable { background: #eee; }
p.note { color: #555; margin: 0.2rem 0; }
"""


@dataclass(frozen=True)
class Section:
    """One experiment: how it ended, and what it says of the paper."""

    step: Step
    folder: Path
    outcome: Outcome
    claims: list[Claim]

    @property
    def failure(self) -> str | None:
        """Why there is nothing to show; None where it succeeded."""
        if not self.outcome.succeeded:
            return f"exit code {self.outcome.returncode}: {self.outcome.last_line}"
        return None

    @property
    def plots(self) -> list[Path]:
        return [self.folder / name for name in self.step.plots if (self.folder / name).is_file()]

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.outcome.command[1:])}"


def summary(sections: Sequence[Section]) -> dict[str, int]:
    """How many claims got each verdict, and how many experiments failed."""
    verdicts = [claim.verdict for section in sections for claim in section.claims]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    return counts | {"experiments that failed": sum(s.failure is not None for s in sections)}


def claim_rows(claims: Sequence[Claim]) -> list[tuple[str, str, str, str, str]]:
    return [(claim.what, claim.paper, claim.ours, claim.verdict, claim.rule) for claim in claims]


def notes(claims: Sequence[Claim]) -> list[str]:
    """The reasons of what differs or cannot be compared, each once."""
    return list(
        dict.fromkeys(
            f"{claim.what}: {claim.note}" for claim in claims if not claim.holds and claim.note
        )
    )


def markdown(
    title: str, sections: Sequence[Section], environment: Mapping[str, object], out_dir: Path
) -> str:
    """With the plots where the experiments left them."""
    parts = [
        f"# {title}\n",
        reporting.markdown_table(("verdict", "claims"), summary(sections).items()),
    ]
    for section in sections:
        parts.append(f"\n## {section.step.title}\n\n")
        if section.failure is not None:
            parts.append(f"Failed: {section.failure}\n")
            continue
        if section.step.remark:
            parts.append(f"{section.step.remark}\n\n")
        if section.claims:
            parts.append(reporting.markdown_table(COLUMNS, claim_rows(section.claims)))
        parts += [f"\n- {note}" for note in notes(section.claims)]
        for plot in section.plots:
            parts.append(f"\n\n![{section.step.title}]({plot.relative_to(out_dir)})\n")
        parts.append(f"\n`{section.command}`, {_took(section)}\n")
    parts.append("\n## Where\n\n")
    parts.append(reporting.markdown_table(("what", "value"), environment.items()))
    return "".join(parts)


def html_page(title: str, sections: Sequence[Section], environment: Mapping[str, object]) -> str:
    """With the plots in it."""
    escape = html.escape
    body = [
        f"<h1>{escape(title)}</h1>",
        _html_table(("verdict", "claims"), summary(sections).items()),
    ]
    for section in sections:
        body.append(f"<h2>{escape(section.step.title)}</h2>")
        if section.failure is not None:
            body.append(f'<p class="differs">Failed: {escape(section.failure)}</p>')
            continue
        if section.step.remark:
            body.append(f"<p>{escape(section.step.remark)}</p>")
        if section.claims:
            body.append(_html_table(COLUMNS, claim_rows(section.claims)))
        body += [f'<p class="note">{escape(note)}</p>' for note in notes(section.claims)]
        for plot in section.plots:
            data = base64.b64encode(plot.read_bytes()).decode()
            alt = escape(section.step.title)
            body.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
        body.append(f"<p><code>{escape(section.command)}</code>, {_took(section)}</p>")
    body += ["<h2>Where</h2>", _html_table(("what", "value"), environment.items())]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return (
        f"<!doctype html>\n<html><head>{head}</head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _took(section: Section) -> str:
    kept = ", kept from an earlier run" if section.outcome.was_kept else ""
    seconds, cpu_seconds = section.outcome.seconds, section.outcome.cpu_seconds
    return f"{seconds:.0f} s ({cpu_seconds:.0f} s of CPU time){kept}"


def _html_table(columns: Sequence[str], rows: Any) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = [reporting.cell(value) for value in row]
        classes = [cell.replace(" ", "") if cell in VERDICTS else "" for cell in cells]
        lines.append(
            "".join(
                f'<td class="{name}">{html.escape(cell)}</td>'
                if name
                else f"<td>{html.escape(cell)}</td>"
                for name, cell in zip(classes, cells, strict=True)
            )
        )
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
