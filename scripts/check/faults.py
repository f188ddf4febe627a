"""Faults that a training and its preparations must survive, tried one by one.

    python -m scripts.check.faults --quick
    python -m scripts.check.faults --only kills inputs --output faults

OUTPUT/results.json       what was tried of each section, and what came of it; after every case
OUTPUT/work               what the cases left, which the next run removes

Sections: kills, disk, inputs, options, numbers, same, leaks, pickles; docs/reliability.md says what
they try. A section, or a case, that is run again replaces what it found before. --page writes the
results into a page, between its two marks; --python names another environment's Python, which must
score and train alike.
A case passes when there are the results of an undisturbed run, or an error that names the thing,
its value and what to do, without a traceback; and when nothing is written elsewhere.
"""

import argparse
import datetime
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from scripts._shared.command_line import command_parser, exit_status, make_output_folder
from scripts._shared.commands import short
from scripts._shared.files import write_json, write_text
from scripts._shared.results import markdown_table
from scripts.check import (
    _faults_disk,
    _faults_inputs,
    _faults_kills,
    _faults_leaks,
    _faults_numbers,
    _faults_options,
    _faults_pickles,
    _faults_same,
)
from scripts.check._faults_materials import Materials
from scripts.check._faults_programs import Case, CaseFailedError, CaseSkippedError, prepare_to_fork

RESULTS = "results.json"
MARKS = "<!-- results: written by the command -->", "<!-- end of the results -->"
PASSED, FAILED, KNOWN, SKIPPED = "passed", "failed", "known", "skipped"


class Section(NamedTuple):
    """A part of the campaign.

    Attributes:
        title: what it tries, for the table.
        cases: gives its cases for the materials, whether the campaign is quick, random draws, and
            what the section has beside.
    """

    title: str
    cases: Callable[..., Iterator[Case]]


SECTIONS = {
    "kills": Section("killed at a random moment, then the same command", _faults_kills.cases),
    "disk": Section("full disk, quota, read-only disk, no permission", _faults_disk.cases),
    "inputs": Section("damaged and wrong files", _faults_inputs.cases),
    "options": Section("options at values that nobody means", _faults_options.cases),
    "numbers": Section("gradients that are not finite", _faults_numbers.cases),
    "same": Section("the same answer otherwise computed", _faults_same.cases),
    "leaks": Section("memory, files and threads of long runs", _faults_leaks.cases),
    "pickles": Section("checkpoints that would run something", _faults_pickles.cases),
}


def try_case(case: Case, folder: Path) -> dict[str, Any]:
    """Result of a case, tried in a folder, which stays only where it failed."""
    folder.mkdir(parents=True)
    started = time.monotonic()
    result, told = PASSED, ""
    try:
        told = case.run(folder) or ""
    except CaseSkippedError as reason:
        result, told = SKIPPED, str(reason)
    except CaseFailedError as problem:
        known = case.known and re.search(case.known.pattern, str(problem))
        result, told = (KNOWN if known else FAILED), str(problem)
    except Exception as error:
        # a case that cannot be tried is no case that passed
        result, told = FAILED, f"the case itself failed: {type(error).__name__}: {error}"
    seconds = round(time.monotonic() - started, 1)
    # where the case was tried is of this machine
    told = told.replace(f"{folder}/", "")
    if result in (PASSED, SKIPPED):
        shutil.rmtree(folder)
    found = {"case": case.name, "result": result, "seconds": seconds, "told": told}
    return {**found, "known": case.known.remedy} if result == KNOWN else found


def run_section(name: str, options: argparse.Namespace, content: dict[str, Any]) -> bool:
    """Try a section's cases and write the results after each; return whether there were any."""
    work = options.output / "work" / name
    shutil.rmtree(work, ignore_errors=True)
    materials = Materials(work / "materials")
    draw = random.Random(f"{options.seed} {name}")
    given = {"pythons": options.python} if name == "same" else {}
    cases = list(SECTIONS[name].cases(materials, options.quick, draw, **given))
    tried: list[dict[str, Any]] = []
    if options.cases:
        cases = [case for case in cases if re.search(options.cases, case.name)]
        again = {case.name for case in cases}
        # what was found of the others stays
        before = content.get(name, {}).get("cases", [])
        tried += [found for found in before if found["case"] not in again]
    if not cases:
        return False
    content[name] = {"title": SECTIONS[name].title, "cases": tried}
    drawn = {"seed": options.seed, "quick": options.quick}
    bar = tqdm(cases, desc=name, unit=" cases", disable=None)
    for number, case in enumerate(bar):
        found = try_case(case, work / f"{number:03}")
        tried.append({**found, **drawn, "date": datetime.date.today().isoformat()})
        write_json(options.output / RESULTS, content)
        if found["result"] in (FAILED, KNOWN):
            tqdm.write(f"{found['result']}: {case.name}: {found['told']}")
        elif found["result"] == PASSED and case.known and case.known.always:
            tqdm.write(f"passes now: {case.name}")
    shutil.rmtree(work / "materials", ignore_errors=True)
    return True


def summary_table(content: dict[str, Any]) -> str:
    """Table of the sections: how many cases there were, and what came of them."""
    rows = []
    for section in content.values():
        cases = section["cases"]
        results = [case["result"] for case in cases]
        counts = [results.count(kind) for kind in (PASSED, FAILED, KNOWN, SKIPPED)]
        longest = max(case["seconds"] for case in cases)
        how = " and ".join(sorted({"quick" if case["quick"] else "full" for case in cases}))
        seeds = {case["seed"] for case in cases}
        seed = f"seed {seeds.pop()}" if len(seeds) == 1 else "several seeds"
        named = f"{section['title']} ({how}, {seed}, {max(case['date'] for case in cases)})"
        counts[1:3] = [sum(counts[1:3])]
        rows.append([named, str(len(results)), *map(str, counts), f"{longest:.0f}"])
    headers = ["tried", "cases", "passed", "failed", "skipped", "longest case, s"]
    return markdown_table(headers, rows)


def figures(content: dict[str, Any]) -> str:
    """List of what cases that passed have measured, those with the same together; "" for none."""
    measured: dict[str, list[str]] = {}
    for section in content.values():
        for case in section["cases"]:
            if case["result"] == PASSED and case["told"]:
                measured.setdefault(case["told"], []).append(case["case"])
    lines = [f"- {told}: {'; '.join(names)}." for told, names in measured.items()]
    return "\n".join(["Measured by cases that passed:", "", *lines] if lines else [])


def failures(content: dict[str, Any]) -> list[str]:
    """Lines of a list of the cases that failed, known ones with what to do."""
    lines = []
    for section in content.values():
        for case in section["cases"]:
            if case["result"] in (FAILED, KNOWN):
                remedy = f" {case['known']}" if case["result"] == KNOWN else ""
                lines.append(f"- {case['case']}: {case['told']}.{remedy}")
    return lines


def write_page(page: Path, content: dict[str, Any]) -> None:
    """Write the results between the marks of a page; raises ValueError when it has none."""
    text = page.read_text(encoding="utf-8")
    before, begun, rest = text.partition(MARKS[0])
    _, ended, after = rest.partition(MARKS[1])
    if not (begun and ended):
        raise ValueError(f"--page {short(page)} lacks the marks {' and '.join(MARKS)}: add them")
    found = failures(content)
    listed = "\n".join(found) if found else "None of them failed."
    parts = [before + MARKS[0], summary_table(content), listed, figures(content), MARKS[1] + after]
    write_text(page, "\n\n".join(filter(None, parts)))


def campaign(options: argparse.Namespace) -> None:
    """Run the sections that were asked for; raises ValueError when a case failed."""
    make_output_folder(options.output)
    if options.page and not options.page.is_file():
        raise ValueError(f"--page {short(options.page)} is no file: name one that is there")
    path = options.output / RESULTS
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    try:
        re.compile(options.cases or "")
    except re.error as error:
        raise ValueError(
            f"--cases is {options.cases!r}: {error}, give a regular expression"
        ) from error
    prepare_to_fork()
    ran = {}
    for name in options.only:
        if run_section(name, options, content):
            ran[name] = content[name]
    if not ran:
        raise ValueError(
            f"--cases is {options.cases!r}: no case of {' '.join(options.only)} has that in its "
            f"name, give what a name in the {RESULTS} of a run without --cases has"
        )
    content = {name: content[name] for name in SECTIONS if name in content}
    if options.page:
        write_page(options.page, content)
    print(summary_table(ran))
    print(f"written to {short(path)}")
    bad = [x["case"] for part in ran.values() for x in part["cases"] if x["result"] == FAILED]
    if bad:
        raise ValueError(f"{len(bad)} cases failed: their folders are in {short(path.parent)}/work")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="some cases of each section, in minutes")
    help_text = "sections to run (all)"
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help=help_text)
    help_text = "of these sections the cases in whose names this regular expression is found"
    add("--cases", metavar="REGEX", help=help_text)
    add("--seed", type=int, default=1, metavar="N", help="of the random draws (1)")
    add("--output", type=Path, default=Path("faults"), help="folder (faults)")
    help_text = "Pythons of other environments with this project's packages"
    add("--python", nargs="+", type=Path, default=[], metavar="PATH", help=help_text)
    add("--page", type=Path, help="page that gets the results, as docs/reliability.md")
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    options.page = options.page and options.page.resolve()
    interrupted = "what was tried is in results.json"
    return exit_status(partial(campaign, options), interrupted, options.output)


if __name__ == "__main__":
    sys.exit(main())
