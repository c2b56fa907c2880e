"""The page of a report: one HTML file with all in it, without scripts or anything from the network."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape

from verl_otb.report.data import Group

_MOST_ROWS = 16
_MOST_TOKENS = 600  # of a row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; } figcaption { color: #444; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
.missing { background: #fff4e5; border-left: 4px solid #d9730d; padding: .5rem 1rem; }
.row { margin: .8rem 0; overflow-wrap: anywhere; }
.row b { display: block; font-size: .85rem; color: #555; font-weight: normal; }
.tokens { font-family: ui-monospace, monospace; font-size: .95rem; line-height: 1.9; white-space: pre-wrap; }
.tokens span { border-radius: 2px; box-shadow: inset 0 0 0 1px #eee; }
.tokens .masked { color: #999; background: #ececec; }
.scale { display: inline-block; width: 8rem; height: .9rem; vertical-align: middle;
         background: linear-gradient(to right, rgba(230,110,10,0), rgba(230,110,10,.9)); border: 1px solid #ccc; }
"""

WORDS = [
    ("score", "The sum of a response's rewards."),
    ("G", "Reward-to-go of a token: the rewards from it to the end of the response."),
    ("w", "Energy of a token, 1 − 2π + Σπ²: how much it could move the policy; 0 where the policy was sure of it."),
    ("W", "Realized energy of a token: the energies up to it in its response added up, each times ρ² if there is ρ."),
    (
        "B",
        "The Optimal Token Baseline: the mean of G over the responses, each weighted by its W, but for options above.",
    ),
    ("A", "Advantage, what the token is trained with: G − B."),
    ("group mean", "The mean score of the responses to the prompt: the baseline that GRPO and its kin take."),
    (
        "gradient power",
        "ρ²A²w. Less of it is less noise, as far as the gradient's expectation stays: B and the group mean hold the "
        "response's own reward, which takes from both.",
    ),
]


def page(
    title: str,
    facts: list[tuple[str, str]],
    missing: list[str],
    sections: list[tuple[str, list[tuple[str, str, bytes]]]],
    tokens: str,
) -> str:
    """The HTML.

    Args:
        title: of the page.
        facts: names and values of a small table.
        missing: what the report could not show, and why, one sentence each.
        sections: heading, and of each picture title, caption and PNG.
        tokens: HTML of the decoded tokens, or "".
    """
    parts = [f"<h1>{escape(title)}</h1>", _table(facts)]
    if missing:
        items = "".join(f"<li>{escape(text)}</li>" for text in missing)
        parts.append(f'<div class="missing">Not in this report:<ul>{items}</ul></div>')
    for heading, pictures in sections:
        parts.append(f"<h2>{escape(heading)}</h2>")
        for name, caption, image in pictures:
            source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
            parts.append(
                f'<figure><img src="{source}" alt="{escape(name)}">'
                f"<figcaption><strong>{escape(name)}.</strong> {escape(caption)}</figcaption></figure>"
            )
    parts += [tokens, "<h2>The words</h2>", _table(WORDS)]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def tokens_by_energy(group: Group, decode: Callable[[int], str]) -> str:
    """The responses' tokens, each as dark as its energy, with its numbers as a tooltip.

    Args:
        group: with `responses`.
        decode: a token id to its text, which is escaped here.
    """
    assert group.responses is not None
    parts = [
        "<h2>The responses, each token as dark as its energy</h2>",
        '<p>w = 0 <span class="scale"></span> w ≥ 1. Of pale tokens the policy was sure; for dark ones it could '
        "as well have put others, and they make the weight of the response. Grey: not trained on. Point at a token for "
        "its numbers.</p>",
    ]
    for row, score in enumerate(group.score[:_MOST_ROWS]):
        live = group.mask[row].nonzero()[0]
        end = int(live[-1]) + 1 if len(live) else 0
        total = group.realized_energy[row, live[-1]] if len(live) else 0.0
        spans = "".join(_span(group, row, token, decode) for token in range(min(end, _MOST_TOKENS)))
        rest = f" … {end - _MOST_TOKENS} tokens more" if end > _MOST_TOKENS else ""
        parts.append(
            f'<div class="row"><b>score {score:.4g}, {len(live)} trained tokens, realized energy {total:.4g}</b>'
            f'<div class="tokens">{spans}{rest}</div></div>'
        )
    if len(group.score) > _MOST_ROWS:
        parts.append(f"<p>… {len(group.score) - _MOST_ROWS} responses more.</p>")
    return "\n".join(parts)


def _span(group: Group, row: int, token: int, decode: Callable[[int], str]) -> str:
    assert group.responses is not None
    decoded = decode(int(group.responses[row, token]))
    # Control characters have no place in HTML, and marks that turn the direction of writing none in a row of tokens.
    text = escape("".join(c if c.isprintable() else "↵\n" if c == "\n" else "·" for c in decoded)) or "∅"
    if not group.mask[row, token]:
        return f'<span class="masked">{text}</span>'
    energy = group.token_energy[row, token]
    numbers = (
        f"token {token + 1}: w {energy:.4g}, W {group.realized_energy[row, token]:.4g}, "
        f"G {group.returns[row, token]:.4g}, B {group.baseline[row, token]:.4g}, "
        f"A {group.advantages[row, token]:.4g}"
    )
    shade = 0.9 * min(float(energy), 1.0)
    return f'<span title="{numbers}" style="background:rgba(230,110,10,{shade:.3f})">{text}</span>'
