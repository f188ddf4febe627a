"""What the check of a GPU has found: which of it is wrong, as tables in Markdown, and as a plot."""

import re
from collections import Counter
from typing import Any

from scripts._shared.results import markdown_table
from scripts.check._gpu_models import AMP, BF16, FP16, FP32, REAL
from scripts.check._gpu_watch import PACKAGE, WAITS

OK, WRONG, FAILED, NOT_REACHED = STATES = ("ok", "wrong", "failed", "not reached")
MIB = 2**20
# Nats a token by which losses may differ from the CPU's in fp32 in the first updates, or after a
# training was resumed, which starts from weights in half precision where it has these.
OF_TRAINING = {FP32: 0.005, BF16: 0.1, FP16: 0.02, AMP: 0.02}
# The same for the first update after that alone, where differences have not grown yet. Tiny models
# differ by 0.006 at most in bf16 and not at all in fp32; fp16 rounds eight times finer than bf16.
OF_RESUMING = {FP32: 0.001, BF16: 0.02, FP16: 0.005, AMP: 0.002}
# The same for one set of weights; fairseq evaluates bf16 models in fp32.
OF_EVALUATION = {FP32: 0.001, BF16: 0.001, FP16: 0.01, AMP: 0.01}
# Parts of the largest output or gradient by which kernels may differ from the plain one in fp32.
OF_KERNELS = {FP32: 1e-4, BF16: 0.05, FP16: 0.01}
# Percent of the words generated in fp32 that must be the CPU's. Rounding decides between two words
# that are as likely as each other, and what comes after that one differs, too.
ALIKE = 90

LEGEND = """
Nats: the largest difference of a loss from the CPU's in fp32, without dropout (trained); from the
same training without a break, in the first update alone (first) and in all (resumed); of the same
checkpoint from the CPU's in fp32 (evaluated); allowed are {training} in training,
{resuming} in the first update and {evaluation} in evaluation.
Tokens a second: of the median update, through fairseq-train; of fairseq-eval-lm or
fairseq-validate. MiB: the most that {memory} held. Waits: how often in an update the host waited
for the GPU, of fairseq and of this package, where only the lines that docs/gpu.md lists may. Words:
how many were generated, and how many of them are also those of the CPU in fp32; in fp32 at least
{alike} % must be.
Rows without a difference are fairseq's own models of the same size, for speed alone."""


def judge(row: dict[str, Any]) -> list[str]:
    """What is wrong in a row's figures."""
    precision = row.get("precision")
    limits = {"difference": OF_TRAINING, "resumed_difference": OF_TRAINING}
    limits |= {"resumed_first_difference": OF_RESUMING, "evaluated_difference": OF_EVALUATION}
    found = [(name, row[name], limit[precision]) for name, limit in limits.items() if name in row]
    found += [
        (name, value["difference"], OF_KERNELS[precision])
        for name, value in row.items()
        if isinstance(value, dict) and "difference" in value
    ]
    # not a number is not within it either
    wrong = [
        f"{name.replace('_', ' ')}: {value:.2g}, allowed is {limit}"
        for name, value, limit in found
        if not value <= limit
    ]
    if precision == FP32 and "generated" in row:
        words, alike = row["generated"], row["generated_alike"]
        if 100 * alike < ALIKE * words:
            wrong.append(f"{alike} of {words} words are the CPU's, at least {ALIKE} % must be")
    return wrong + [
        f"the host waits at {place}, which docs/gpu.md does not list"
        for place in row.get("waits", {})
        if place.startswith(f"{PACKAGE.name}/") and re.sub(r":\d+ ", " ", place) not in WAITS
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    def number(name: str) -> str:
        return f"{row[name]:.2g}" if name in row else ""

    def speed(name: str) -> list[str]:
        if name not in row:
            return ["", ""]
        return [f"{row[name]['tokens_per_second']:,.0f}", f"{row[name]['peak_bytes'] / MIB:,.0f}"]

    waits = f"{sum(row['waits'].values()):g}" if "waits" in row else ""
    words = f"{row['generated_alike']} of {row['generated']}" if "generated" in row else ""
    resumed = ("resumed_first_difference", "resumed_difference")
    differences = ("difference", *resumed, "evaluated_difference")
    return [
        row["name"],
        row["state"],
        *map(number, differences),
        *speed("training"),
        *speed("evaluation"),
        waits,
        str(row["overflows"] or "") if "overflows" in row else "",
        words,
    ]


def _allowed(limits: dict[str, float]) -> str:
    return ", ".join(f"{limit} ({name})" for name, limit in limits.items())


def summary(content: dict[str, Any]) -> str:
    """How many rows came to what, in a sentence."""
    counts = Counter(row["state"] for row in content["rows"])
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return f"{len(content['rows'])} rows in {content['seconds'] / 60:.1f} minutes: {told}"


def texts(content: dict[str, Any]) -> list[str]:
    """The report in Markdown, part by part."""
    rows = content["rows"]
    parts = [f"{content['hardware']}.", f"{summary(content)}."]
    bad = [(row["name"], row["state"], "; ".join(row["why"])) for row in rows if row["why"]]
    if bad:
        parts.append(markdown_table(["not ok", "", "why"], bad))
    late = [row["name"] for row in rows if row["state"] == NOT_REACHED and not row["why"]]
    if late:
        parts.append(f"Not reached: {', '.join(late)}.")
    trained = [row for row in rows if "training" in row or "difference" in row]
    if trained:
        heads = "model|state|trained, nats|first, nats|resumed, nats|evaluated, nats|"
        heads += "training, tokens/s|MiB|evaluation, tokens/s|MiB|waits|overflows|words"
        parts.append(markdown_table(heads.split("|"), list(map(_cells, trained))))
        legend = LEGEND.format(
            training=_allowed(OF_TRAINING),
            resuming=_allowed(OF_RESUMING),
            evaluation=_allowed(OF_EVALUATION),
            alike=ALIKE,
            memory="PyTorch on the GPU" if content["device"] == "cuda" else "the process",
        )
        parts.append(legend.strip())
    if content["device"] == "cpu":
        parts.append("On a CPU waits of the host are not counted, and fairseq has no --amp.")
    parts += _waits(rows)
    kernels = [
        [
            row["name"],
            kernel,
            f"{value['milliseconds']:.2f}",
            f"{value['difference']:.1g}",
            f"{value['peak_bytes'] / MIB:,.0f}",
        ]
        for row in rows
        for kernel, value in row.items()
        if isinstance(value, dict) and "milliseconds" in value
    ]
    if kernels:
        heads = ["attention", "kernel", "forward and backward, ms", "off by", "MiB"]
        parts.append(markdown_table(heads, kernels))
    published = [
        [
            row["name"],
            *(str(found[name]) for name in ("size", "mode", "setting", "model", "dtype")),
            f"{found['tokens_per_second']:,.0f}",
            f"{found['peak_bytes'] / MIB:,.0f}",
        ]
        for row in rows
        for found in row.get("published", [])
    ]
    if published:
        heads = ["beside published code", "size", "mode", "setting", "model", "dtype"]
        parts.append(markdown_table([*heads, "tokens/s", "MiB"], published))
    return parts


def _waits(rows: list[dict[str, Any]]) -> list[str]:
    """A table of the places where the host waits, how often an update, and in which rows."""
    places: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        for place, number in row.get("waits", {}).items():
            places.setdefault((place, number), []).append(row["name"])
    cells = [[place, f"{n:g}", ", ".join(names)] for (place, n), names in sorted(places.items())]
    return [markdown_table(["the host waits at", "times an update", "in"], cells)] if cells else []


def draw(speeds: Any, kernels: Any, rows: list[dict[str, Any]]) -> None:
    """Draw tokens a second of trainings, of the real size where it was reached, and of kernels."""
    trained = [row for row in rows if "training" in row]
    shown = [row for row in trained if row["size"] == REAL] or trained
    _bars(
        speeds,
        [(row["name"], row["training"]["tokens_per_second"]) for row in shown],
        "training, tokens a second",
        "%.0f",
    )
    timed = [
        (f"{row['name']}, {kernel}", value["milliseconds"])
        for row in rows
        for kernel, value in row.items()
        if isinstance(value, dict) and "milliseconds" in value
    ]
    _bars(kernels, timed, "forward and backward pass, milliseconds", "%.2f")


def _bars(axes: Any, bars: list[tuple[str, float]], title: str, form: str) -> None:
    axes.set_xlabel(title)
    if not bars:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not reached", ha="center", transform=axes.transAxes)
        return
    names, values = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), values)
    axes.set_yticks(range(len(bars)), names, fontsize=7)
    axes.bar_label(drawn, fmt=f" {form}", fontsize=7)
    # a few bars are no thicker than many
    axes.set_ylim(max(len(bars), 8) - 0.5, -0.5)
    axes.margins(x=0.2)
