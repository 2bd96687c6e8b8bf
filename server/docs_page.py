"""The HTML of the API reference: no script, nothing loaded from elsewhere, readable as it is."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from server.reference import Answer, Endpoint, FieldRow

_CSS = """
:root { color-scheme: light dark; --text: #1d2129; --soft: #5c6470; --line: #dde1e7; --back: #fff;
  --panel: #f5f6f8; --link: #0b5cad; --get: #1f6f43; --post: #8a4b08; --must: #a8201a; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ec; --soft: #9aa3b0; --line: #333a45;
  --back: #14171c; --panel: #1d2128; --link: #7cb7f5; --get: #6fcf97; --post: #e8b06a; --must: #ff9089; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 68rem;
  background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
a { color: var(--link); }
h1 { margin: 0; font-size: 1.9rem; }
h1 small { color: var(--soft); font-weight: 400; font-size: 1rem; }
h2 { margin: 3rem 0 .25rem; padding-top: 1rem; border-top: 2px solid var(--line); font-size: 1.3rem; }
h2 code, nav code { background: none; padding: 0; }
h3 { margin: 1.5rem 0 .4rem; font-size: 1rem; }
h3 span { color: var(--soft); font-weight: 400; }
p { margin: .4rem 0; }
code, pre { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .875em; }
code { background: var(--panel); padding: .1em .3em; border-radius: 4px; }
pre { margin: .4rem 0; padding: .8rem 1rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; overflow-x: auto; }
nav table { width: auto; margin: 1rem 0; }
nav td { border: 0; padding: .15rem 1.2rem .15rem 0; }
table { width: 100%; border-collapse: collapse; font-size: .925rem; }
.wide { overflow-x: auto; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:last-child, th:last-child { padding-right: 0; }
td.name { white-space: nowrap; }
td.name code { background: none; padding: 0; }
td.kind { min-width: 11rem; max-width: 17rem; overflow-wrap: anywhere; }
td.text { min-width: 16rem; }
.soft, .outer { color: var(--soft); }
.must { color: var(--must); font-size: .85em; }
.get { color: var(--get); } .post { color: var(--post); } .delete { color: var(--must); }
table.narrow { width: auto; }
@media (max-width: 44rem) { .wide th { display: none; } .wide tr { display: block; padding: .5rem 0;
  border-bottom: 1px solid var(--line); } .wide td { display: block; padding: .1rem 0; border: 0; }
  .wide td.name, .wide td.kind { white-space: normal; overflow-wrap: anywhere; max-width: none; }
  .wide td.default:not(:empty)::before { content: "default "; color: var(--soft); } }
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client finds the server.

    Attributes:
        base_url: What the examples send requests to.
        root_path: What links within the server begin with.
    """

    base_url: str
    root_path: str


@dataclass(frozen=True, slots=True)
class Heading:
    """What the page is about."""

    title: str
    version: str
    summary: str


def render_page(heading: Heading, endpoints: Sequence[Endpoint], place: Place) -> str:
    """The whole page."""
    title, version = escape(heading.title), escape(heading.version)
    schema = escape(f"{place.root_path}/openapi.json")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} API</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{title} <small>{version}</small></h1>
<p>{escape(heading.summary)}</p>
<p>Base URL for OpenAI clients: <code>{escape(place.base_url)}/v1</code>. In a request <code>null</code>
means the same as leaving a field out. This page for programs: <a href="{schema}">{schema}</a>.</p>
{_contents(endpoints)}
{"".join(_endpoint(endpoint, place.base_url) for endpoint in endpoints)}
{_errors(endpoints)}
</body>
</html>
"""


def _contents(endpoints: Sequence[Endpoint]) -> str:
    lines = (
        f"<tr><td>{_method(endpoint)}</td>"
        f'<td><a href="#{_anchor(endpoint)}"><code>{escape(endpoint.path)}</code></a></td>'
        f"<td>{escape(_first_line(endpoint.description))}</td></tr>"
        for endpoint in endpoints
    )
    return f"<nav><table>{''.join(lines)}</table></nav>"


def _endpoint(endpoint: Endpoint, base_url: str) -> str:
    return f"""
<section id="{_anchor(endpoint)}">
<h2>{_method(endpoint)} <code>{escape(endpoint.path)}</code></h2>
<p>{_prose(endpoint.description)}</p>
<pre>{escape(_curl(endpoint, base_url))}</pre>
{_fields("Path", endpoint.parameters, asked=True)}
{_fields("Request", endpoint.body, asked=True)}
{"".join(_answer(answer) for answer in endpoint.answers)}
{_statuses(endpoint.errors)}
</section>"""


def _fields(title: str, rows: Sequence[FieldRow], *, asked: bool, note: str = "") -> str:
    if not rows:
        return ""
    default = "<th>Default</th>" if asked else ""
    lines = "".join(_field(row, asked=asked) for row in rows)
    note = note and f" <span>{escape(note)}</span>"
    return f"""<h3>{escape(title)}{note}</h3>
<div class="wide"><table>
<tr><th>Field</th><th>Type</th>{default}<th>Meaning</th></tr>
{lines}</table></div>"""


def _field(row: FieldRow, *, asked: bool) -> str:
    must = ' <span class="must">required</span>' if row.required else ""
    limits = f'<br><span class="soft">{escape(row.limits)}</span>' if row.limits else ""
    default = f"<code>{escape(row.default)}</code>" if row.default else ""
    default = f'<td class="default">{default}</td>' if asked else ""
    parent = f'<span class="outer">{escape(row.parent)}</span>' if row.parent else ""
    return (
        f'<tr><td class="name"><code>{parent}{escape(row.name)}</code>{must}</td>'
        f'<td class="kind">{escape(row.kind)}{limits}</td>{default}'
        f'<td class="text">{_prose(row.description)}</td></tr>\n'
    )


def _answer(answer: Answer) -> str:
    parts = [f"<h3>Answer {answer.status} <span>{escape(answer.description)}</span></h3>"]
    for body in answer.bodies:
        table = _fields("", body.rows, asked=False, note=body.media_type)
        parts.append(table or f'<p class="soft">{escape(body.media_type)}</p>')
    return "".join(parts)


def _statuses(errors: Iterable[Answer]) -> str:
    lines = "".join(
        f"<tr><td>{error.status}</td><td>{escape(error.description)}</td></tr>" for error in errors
    )
    return lines and f'<h3>Errors</h3>\n<table class="narrow">{lines}</table>'


def _errors(endpoints: Sequence[Endpoint]) -> str:
    """What errors consist of, once; but for those that look like the endpoint's usual answer."""
    bodies = dict.fromkeys(
        body
        for endpoint in endpoints
        for error in endpoint.errors
        for body in error.bodies
        if all(body not in answer.bodies for answer in endpoint.answers)
    )
    tables = "".join(_fields("", body.rows, asked=False, note=body.media_type) for body in bodies)
    return tables and f'<section id="errors"><h2>Errors</h2>{tables}</section>'


def _curl(endpoint: Endpoint, base_url: str) -> str:
    url = shlex.quote(base_url + endpoint.example_path)
    if not endpoint.example_body:
        method = "" if endpoint.method == "GET" else f"-X {endpoint.method} "
        return f"curl {method}{url}"
    body = shlex.quote(endpoint.example_body)
    return f"curl {url} \\\n  -H 'Content-Type: application/json' \\\n  -d {body}"


def _prose(text: str) -> str:
    """A docstring's paragraphs on one line each."""
    return "<br>".join(escape(" ".join(part.split())) for part in text.split("\n\n"))


def _method(endpoint: Endpoint) -> str:
    return f'<span class="{endpoint.method.lower()}">{endpoint.method}</span>'


def _anchor(endpoint: Endpoint) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{endpoint.method} {endpoint.path}".lower()).strip("-")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
