"""The report as Markdown, and as one HTML file that needs no other."""

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from experiments.lib.claims import VERDICTS, Claim
from experiments.lib.reporting import markdown_table

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
li { color: #555; margin: 0.2rem 0; }
"""


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

    def blocks(self, out_dir: Path | None) -> Iterator[str]:
        """What the report shows of it, as Markdown."""
        yield f"## {self.title}"
        if self.failure is not None:
            yield f"Failed: {self.failure}"
            return
        if self.remark:
            yield self.remark
        if self.claims:
            rows = [(c.what, c.paper, c.ours, c.verdict, c.rule) for c in self.claims]
            yield markdown_table(COLUMNS, rows)
        # The reasons of what differs or cannot be compared, each once.
        unmet = [claim for claim in self.claims if not claim.holds and claim.note]
        if notes := dict.fromkeys(f"- {claim.what}: {claim.note}" for claim in unmet):
            yield "\n".join(notes)
        for plot in sorted(self.folder.glob("*.png")):
            inline = f"data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}"
            yield f"![{self.title}]({plot.relative_to(out_dir) if out_dir else inline})"
        yield f"`{self.command}`, {self.took}"


def summary(sections: Sequence[Section]) -> dict[str, int]:
    """How many claims got each verdict, and how many experiments failed."""
    verdicts = [claim.verdict for section in sections for claim in section.claims]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    return counts | {"experiments that failed": sum(s.failure is not None for s in sections)}


def markdown(
    title: str,
    sections: Sequence[Section],
    environment: Mapping[str, object],
    out_dir: Path | None = None,
) -> str:
    """The report as Markdown in `out_dir`, with links to the plots; without it they are inline."""
    blocks = [f"# {title}", markdown_table(("verdict", "claims"), summary(sections).items())]
    for section in sections:
        blocks += section.blocks(out_dir)
    blocks += ["## Where", markdown_table(("what", "value"), environment.items())]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def html_page(title: str, sections: Sequence[Section], environment: Mapping[str, object]) -> str:
    """The same as one HTML file, with the plots in it."""
    to_html = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = to_html.render(markdown(title, sections, environment))
    body = body.replace("<p>Failed: ", '<p class="differs">Failed: ')
    for verdict in VERDICTS:
        marked = f'<td class="{verdict.replace(" ", "")}">{verdict}</td>'
        body = body.replace(f"<td>{verdict}</td>", marked)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n{body}</body></html>\n"
