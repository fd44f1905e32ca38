"""The report: one HTML file that needs no other, and the same as Markdown."""

import base64
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lib.claims import VERDICTS, Claim
from experiments.lib.reporting import cell, markdown_table

COLUMNS = ("claim", "paper", "here", "verdict", "counts as reproduced")

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
_MARKDOWN = {
    "title": "# {}\n",
    "heading": "\n## {}\n\n",
    "failure": "Failed: {}\n",
    "text": "{}\n\n",
    "note": "\n- {}",
    "command": "\n`{}`, {}\n",
}
_HTML = {
    "title": "<h1>{}</h1>",
    "heading": "<h2>{}</h2>",
    "failure": '<p class="differs">Failed: {}</p>',
    "text": "<p>{}</p>",
    "note": '<p class="note">{}</p>',
    "plot": '<p><img alt="{}" src="data:image/png;base64,{}"></p>',
    "command": "<p><code>{}</code>, {}</p>",
}


@dataclass(frozen=True)
class Section:
    """One experiment: how it ended, and what it says of the paper."""

    name: str
    title: str
    remark: str  # what a reader of the claims has to know
    folder: Path  # of its results
    command: str
    took: str
    failure: str | None  # why there is nothing to show; None where it succeeded
    claims: list[Claim]

    @property
    def plots(self) -> list[Path]:
        return sorted(self.folder.glob("*.png"))


def summary(sections: Sequence[Section]) -> dict[str, int]:
    """How many claims got each verdict, and how many experiments failed."""
    verdicts = [claim.verdict for section in sections for claim in section.claims]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    return counts | {"experiments that failed": sum(s.failure is not None for s in sections)}


Block = tuple[Any, ...]  # its kind, and what it shows


def blocks(
    title: str, sections: Sequence[Section], environment: Mapping[str, object]
) -> Iterator[Block]:
    """All that the report shows, in order."""
    yield "title", title
    yield "table", ("verdict", "claims"), summary(sections).items()
    for section in sections:
        yield "heading", section.title
        if section.failure is not None:
            yield "failure", section.failure
            continue
        if section.remark:
            yield "text", section.remark
        if section.claims:
            rows = [(c.what, c.paper, c.ours, c.verdict, c.rule) for c in section.claims]
            yield "table", COLUMNS, rows
        # The reasons of what differs or cannot be compared, each once.
        unmet = [claim for claim in section.claims if not claim.holds and claim.note]
        notes = dict.fromkeys(f"{claim.what}: {claim.note}" for claim in unmet)
        yield from (("note", note) for note in notes)
        yield from (("plot", section.title, plot) for plot in section.plots)
        yield "command", section.command, section.took
    yield "heading", "Where"
    yield "table", ("what", "value"), environment.items()


def markdown(
    title: str, sections: Sequence[Section], environment: Mapping[str, object], out_dir: Path
) -> str:
    """The report as Markdown in `out_dir`, with links to the plots."""

    def shown(kind: str, *what: Any) -> str:
        if kind == "table":
            return markdown_table(*what)
        if kind == "plot":
            title, path = what
            return f"\n\n![{title}]({path.relative_to(out_dir)})\n"
        return _MARKDOWN[kind].format(*what)

    return "".join(shown(*block) for block in blocks(title, sections, environment))


def html_page(title: str, sections: Sequence[Section], environment: Mapping[str, object]) -> str:
    """The report as one HTML file, with the plots in it."""

    def shown(kind: str, *what: Any) -> str:
        if kind == "table":
            return _html_table(*what)
        if kind == "plot":
            title, path = what
            what = title, base64.b64encode(path.read_bytes()).decode()
        return _HTML[kind].format(*map(html.escape, what))

    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(shown(*block) for block in blocks(title, sections, environment))
    return f"<!doctype html>\n<html><head>{head}</head><body>\n{body}\n</body></html>\n"


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def shown(text: str) -> str:
        kind = f' class="{text.replace(" ", "")}"' if text in VERDICTS else ""
        return f"<td{kind}>{html.escape(text)}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ["".join(shown(cell(value)) for value in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
