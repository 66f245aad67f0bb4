"""Writes docs/measurements.md from docs/evidence/*.json; `--check` only says whether it would change.

Every number comes from an evidence file; nothing is typed here.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FASTER = 1 / 0.95
LEGEND = "Rewards: -1 not correct, 1 correct, 2 also faster than eager, 3 also than `torch.compile` (lower bounds)."


def about(evidence: dict[str, Any]) -> str:
    """Where, with what and at which commit a stage ran."""
    versions = [f"{name} {value}" for name, value in sorted(evidence.get("versions", {}).items())]
    return f"`{evidence['command']}` at `{evidence['commit'][:12]}`. {'; '.join([evidence['card'], *versions])}."


def mean(values: list[float]) -> str:
    """Geometric mean."""
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}" if values else "-"


def cell(speedup: dict[str, Any] | None) -> str:
    """A speedup with its interval."""
    return f"{speedup['median']:.2f} ({speedup['low']:.2f} to {speedup['high']:.2f})" if speedup else "-"


def over(rows: list[dict[str, Any]], against: str) -> int:
    """How many lower bounds count as faster."""
    return sum((r["speedup"][against] or {}).get("low", 0.0) > FASTER for r in rows)


def policy(evidence: dict[str, Any]) -> list[str]:
    """The built-in policy over KernelBench."""
    rows = evidence["result"]["rows"]
    correct = [r for r in rows if r["state"] == "judged" and (r["reward"] or -1) >= 1]
    wrong = [r for r in rows if r["state"] == "judged" and r["reward"] == -1]
    refused = [r for r in rows if r["state"] == "refused"]
    memory = [r for r in wrong + refused if r["code"] == "memory" or "out of memory" in (r["reason"] or "")]
    eager = [r["speedup"]["eager"]["median"] for r in correct]
    compiled = [r["speedup"]["compile"]["median"] for r in correct if r["speedup"]["compile"]]
    held = spent(correct, "held")
    ratio = [r["phases_seconds"]["held"] / r["phases_seconds"]["measure"] for r in correct if r.get("phases_seconds")]
    levels = ", ".join(evidence["result"]["levels"])
    commits: dict[str, int] = {}
    for row in rows:
        commit = row.get("commit", evidence["commit"])[:12]
        commits[commit] = commits.get(commit, 0) + 1
    came = "; ".join(f"{count} at `{commit}`" for commit, count in commits.items())
    text = [
        f"## The built-in policy, KernelBench level {levels}, precision reference",
        "",
        about(evidence),
        "",
        f"{len(rows)} tasks are done ({came}): {len(correct)} correct, "
        f"{over(correct, 'eager')} of them faster than eager and {over(correct, 'compile')} faster than `torch.compile` by the lower bound; "
        f"{len(wrong)} not correct, {len(refused)} refused as tasks. Of these {len(memory)} ran out of the card's memory beside other tasks. "
        f"Geometric mean over the correct: {mean(eager)} over eager, {mean(compiled)} over compile.",
        "",
        f"The best candidate's evaluation held the card for {statistics.median(held):.2f} s (median; 95 % within {share(held, 0.95):.2f} s), "
        f"{statistics.median(ratio):.2f} times (median) the seconds that it measured.",
        "",
        LEGEND,
        "",
        "| task | reward | over eager | over compile | why not |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        speedup = row["speedup"] or {}
        why = " ".join((row["reason"] or "").split()).replace("|", "/")[:110]
        reward = row["reward"] if row["state"] == "judged" else row["state"]
        text.append(
            f"| {row['task']} | {reward} | {cell(speedup.get('eager'))} | {cell(speedup.get('compile'))} | {why} |"
        )
    return text


def smoke(evidence: dict[str, Any]) -> list[str]:
    """Hand-written candidates."""
    text = ["## Hand-written candidates on the card", "", about(evidence), "", LEGEND, ""]
    text += [
        "| case | reward | over eager | over compile | candidate us | evaluation s, compile aside | held s | reason |"
    ]
    text += ["|---|---|---|---|---|---|---|---|"]
    for row in evidence["result"]["rows"]:
        verdict, phases = row["verdict"], row["verdict"]["phases_seconds"]
        time = (verdict["time_us"]["candidate"] or {}).get("median")
        reason = verdict["reason"]
        text.append(
            f"| {row['case']} | {verdict['reward']} | {cell(verdict['speedup']['eager'])} | {cell(verdict['speedup']['compile'])} | "
            f"{f'{time:.1f}' if time else '-'} | {phases['total'] - phases.get('compile', 0):.2f} | {phases.get('held', 0):.2f} | "
            f"{reason['code'] + ': ' + reason['message'][:90] if reason else ''} |"
        )
    return [*text, "", evidence["result"].get("remark", "")]


def selftest(evidence: dict[str, Any]) -> list[str]:
    """The runner's own checks."""
    return [
        "## The runner's own checks",
        "",
        about(evidence),
        "",
        *[f"- {line}" for line in evidence["result"]["passed"]],
    ]


def library(evidence: dict[str, Any]) -> list[str]:
    """Library calls against eager."""
    text = ["## Convolutions by the library, against eager", "", about(evidence), ""]
    text += ["| case | candidate over eager | candidate us | reason |", "|---|---|---|---|"]
    for row in evidence["result"]["rows"]:
        time = ((row["time_us"] or {}).get("candidate") or {}).get("median")
        reason = f"{row['reason']['code']}: {row['reason']['message'][:90]}" if row["reason"] else ""
        text.append(f"| {row['case']} | {cell(row['over_eager'])} | {f'{time:.1f}' if time else '-'} | {reason} |")
    return text


def spent(rows: list[dict[str, Any]], phase: str) -> list[float]:
    """Seconds of a phase, of every row that has it."""
    return [r["phases_seconds"][phase] for r in rows if phase in (r.get("phases_seconds") or {})]


def share(values: list[float], part: float) -> float:
    """The value that a part of them don't exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]


def process(evidence: dict[str, Any]) -> list[str]:
    """Candidates that run as they are."""
    result = evidence["result"]
    early = result["early_done"]
    text = ["## Candidates of the process path", "", about(evidence), ""]
    text += [
        f"The candidate that answers before its work is done: judged {early['judged']} times, refused "
        f"{early['refused']} times; {early['paid']} times accepted with the wait paid. "
        f"{result['at_once']} were built and judged beside each other, measured one at a time.",
        *([f"Not reached in the time given: {result['left']} judgements."] if result["left"] else []),
        "",
        LEGEND,
        "",
        "| case | reward | over eager | over compile | candidate us | build s | evaluation s | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["number"]:
            continue
        phases, time = row["phases_seconds"] or {}, ((row["time_us"] or {}).get("candidate") or {}).get("median")
        speedup, reason = row["speedup"] or {}, row["reason"]
        why = f"{reason['code']}: {' '.join(reason['message'].split())[:90]}".replace("|", "/") if reason else ""
        text.append(
            f"| {row['case']} | {row['reward']} | {cell(speedup.get('eager'))} | {cell(speedup.get('compile'))} | "
            f"{f'{time:.1f}' if time else '-'} | {phases.get('build', 0):.2f} | {phases.get('total', 0):.2f} | {why} |"
        )
    return text


def check(evidence: dict[str, Any]) -> list[str]:
    """KernelBench's tasks under the contract's refusals."""
    rows = evidence["result"]["rows"]
    text = ["## KernelBench's tasks, checked", "", about(evidence), ""]
    for level in sorted({row["level"] for row in rows}):
        of = [row for row in rows if row["level"] == level]
        commits = ", ".join(sorted({f"`{row['commit'][:12]}`" for row in of}))
        text.append(f"- {level}: {len(of)} checked, {sum(row['accepted'] for row in of)} accepted (at {commits})")
    left = evidence["result"]["left"]
    text += [f"- not reached in the time given: {left}"] if left else []
    text += ["", "| task | refused since |", "|---|---|"]
    for row in rows:
        if not row["accepted"]:
            said = Counter(f"{r['code']}: {' '.join(r['message'].split())[:120]}" for r in row["refusals"])
            why = "; ".join(f"{text} ({times} of them)" if times > 1 else text for text, times in said.items())
            text.append(f"| {row['level']}/{row['task']} | {why.replace('|', '/')} |")
    return text


def repeat(evidence: dict[str, Any]) -> list[str]:
    """The same kernels judged again and again."""
    text = ["## The same candidates, ten verdicts each", "", about(evidence), ""]
    came = Counter(row.get("commit", evidence["commit"])[:12] for row in evidence["result"]["rows"])
    if len(came) > 1:
        text += ["Rows: " + "; ".join(f"{count} at `{commit}`" for commit, count in came.items()) + ".", ""]
    text += [
        "| task | verdicts | over eager | coefficient of variation | candidate us | evaluation s, median | held s, median |"
    ]
    text += ["|---|---|---|---|---|---|---|"]
    for row in evidence["result"]["rows"]:
        total, held = (statistics.median(p[k] for p in row["phases"]) for k in ("total", "held"))
        text.append(
            f"| {row['task']} | {row['runs']} | {row['speedup']:.3f} | {100 * row['cv']:.2f} % | {row['time_us']:.1f} | {total:.2f} | {held:.2f} |"
        )
    return text


def batch(evidence: dict[str, Any]) -> list[str]:
    """Candidates of one task together."""
    text = ["## A batch of candidates of a small task", "", about(evidence), ""]
    text += [
        "Verdicts a second are counted from the first verdict to the last: without the start of the judge and of the task's "
        "host. Aim: 4.",
        "",
        "| run | verdicts | correct | seconds of the whole command | verdicts a second | seconds between two, median | most | held s, median | checked s, median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in evidence["result"]["rows"]:
        after, phases = row["verdict_after_seconds"], row["phases_median_seconds"]
        between = [b - a for a, b in pairwise(after)]
        text.append(
            f"| {row['which']} | {row['verdicts']} | {row['correct']} | {row['seconds']:.1f} | {row['verdicts_a_second']:.2f} | "
            f"{statistics.median(between):.2f} | {max(between):.2f} | {phases['held']:.2f} | {phases['correct']:.2f} |"
        )
    if mixed := evidence["result"].get("mixed"):
        said = ", ".join(row["code"] or "accepted" for row in mixed)
        text += [
            "",
            f"Candidates that are wrong or break their context among others got the verdicts that are theirs: {said}.",
        ]
    return text


def cluster(evidence: dict[str, Any]) -> list[str]:
    """The operator with a pool of a card."""
    r = evidence["result"]
    slices, rows, seconds = r["slices"], r["verdicts"], r["seconds"]
    text = ["## The operator with a pool of one card", "", about(evidence), ""]
    text += [
        f"One node with the test bed's Kubernetes, a `cuda` pool of one judge, two jobs of the built-in policy. {seconds['up']:.0f} s "
        f"until the cluster was up, {seconds['ready']:.0f} s until the pool was ready, {seconds['jobs']:.0f} s until both jobs ended. "
        f"Exclusive slices: {slices['exclusive']} of {slices['exclusive_seconds']:.0f} s in all, {slices['overlapping']} that "
        f"overlap; leases: {slices['leases']}, {slices['leases_of_both_jobs_at_once']} pairs of both jobs at once.",
        "",
        "| job | tasks | correct | faster than eager | than compile | turns | GPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, status in r["jobs"].items():
        keys = ("tasks", "correct", "fasterThanEager", "fasterThanCompile", "turns")
        figures = [str(status.get(key)) for key in keys] + [f"{status.get('gpuSeconds') or 0:.0f}"]
        text.append(f"| {name} | {' | '.join(figures)} |")
    text += [
        "",
        f"Best candidates fetched and judged again in local mode on the same card: {sum(row['agree'] for row in rows)} of "
        f"{len(rows)} with the same verdict.",
        "",
        "| job | task | reward, cluster | reward, local | over eager, cluster | over eager, local |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [f"{row[w].get('over_eager') or 0:.2f}" for w in ("cluster", "local")]
        rewards = [str(row[w].get("reward")) for w in ("cluster", "local")]
        text.append(f"| {row['job']} | {row['task']} | {' | '.join(rewards + figures)} |")
    return text


def counters(evidence: dict[str, Any]) -> list[str]:
    """What the hardware counts."""
    text = ["## Counters", "", about(evidence), "", "By `ncu`, with cold caches.", ""]
    text += [
        "| case | kernels of | kernel | us | arithmetic | memory | occupancy | MB read, written | waits most for |"
    ]
    text += ["|---|---|---|---|---|---|---|---|---|"]
    for row in evidence["result"]["rows"]:
        for kernel in row["kernels"]:
            c, stalls = kernel["counters"], kernel["stalls"]
            most = max(stalls, key=lambda what: stalls[what], default="-")
            shares = [f"{c.get(k, 0):.0f} %" for k in ("compute_percent", "memory_percent", "occupancy_percent")]
            moved = ", ".join(f"{c.get(k, 0) / 1e6:.1f}" for k in ("dram_read_bytes", "dram_write_bytes"))
            figures = [
                row["case"],
                row["whose"],
                f"`{kernel['name'][:60]}`",
                f"{c.get('time_ns', 0) / 1e3:.1f}",
                *shares,
            ]
            text.append(f"| {' | '.join([*figures, moved, most])} |")
        if not row["kernels"]:
            text.append(f"| {row['case']} | {row['whose']} | {row['stderr'][-200:]} | | | | | | |")
    return text


def amount(value: float | None, unit: float, word: str) -> str:
    """A figure that a run may not know."""
    return "-" if value is None else f"{value / unit:.0f} {word}"


def scale(evidence: dict[str, Any]) -> list[str]:
    """What the operator costs beside many agent pods."""
    r, mib = evidence["result"], 1 << 20
    idle, start, restart = r["idle"], r["start"], r["restart"]
    seconds = r["seconds"]
    when = "when idle" if idle["all_run"] else "while kwok still said of pods that they run"
    so_far = "" if idle["all_run"] else ", while not all of them ran yet"
    rows = [
        ("the operator's own writes an episode", f"{r['own_writes_an_episode']:.3f}", "under 0.1"),
        ("the operator's memory, at most", f"{r['memory_bytes']['at_most'] / mib:.0f} MiB", "under 200 MB"),
        ("the operator's memory before the first job", amount(r["memory_bytes"]["at_rest"], mib, "MiB"), ""),
        (f"all writes of a pod, by whoever{so_far}", f"{r['pod_writes_a_pod']:.2f}", ""),
        (f"all writes of the cluster, a pod{so_far}", f"{r['all_writes_a_pod']:.2f}", ""),
        ("seconds until all Jobs were made", f"{seconds['jobs_made']:.0f}", ""),
        ("seconds until all pods were made", f"{seconds['pods_made']:.0f}", ""),
        ("seconds until all pods were said to run", amount(seconds["pods_running"], 1, "").strip(), ""),
        ("processor time of the operator until then and 75 s more", amount(start["cpu_seconds"], 1, "s"), ""),
        (
            "the operator ended by itself, unable to renew its lease, and began again",
            f"{r['restarts_by_itself']} times",
            "",
        ),
        (f"share of a core {when}", f"{100 * idle['cpu_share']:.1f} %", "no hot loop"),
        (f"the operator's own writes {when}", f"{idle['own_writes']} in {idle['seconds']:.0f} s", ""),
        (f"reconciliations a second {when}", f"{sum(idle['reconciliations_a_second'].values()):.1f}", ""),
        ("restarted with all present: seconds until every job was seen", f"{restart['seconds']:.1f}", ""),
        ("its own writes then", str(restart["own_writes"]), ""),
        ("its memory then, at most", f"{restart['memory']['most'] / mib:.0f} MiB", "under 200 MB"),
    ]
    writes = ", ".join(f"{n} x {what}" for what, n in start["own_writes_by_kind"].items())
    limits = "; ".join(f"{who}: {limit}" for who, limit in r["limits"].items())
    return [
        f"## The operator with {r['pods']:,} agent pods over {r['jobs']} jobs",
        "",
        f"`{evidence['command']}` at `{evidence['commit'][:12]}`, a {evidence['build']} build. {evidence['machine']}. "
        f"API server, etcd, controllers, scheduler, operator and broker are real, on one machine; {r['fake_nodes']} nodes are "
        f"kwok's, which says of a pod that it runs. {evidence['remark']}".rstrip(),
        "",
        "| | | target |",
        "|---|---|---|",
        *[f"| {what} | {value} | {target} |" for what, value, target in rows],
        "",
        f"The operator's own writes were {writes}; renewals of its lease aren't counted. Limits of the clients: {limits}.",
    ]


def broker(evidence: dict[str, Any]) -> list[str]:
    """What the broker can carry."""
    r = evidence["result"]
    grant = r["grant_us"]
    return [
        "## The broker",
        "",
        f"`{evidence['command']}` at `{evidence['commit'][:12]}`, a {evidence['build']} build. {evidence['machine']}. A broker as "
        f"pods find it, over TLS, its ledger on disk; {r['agents']} agents that ask one thing after another and {r['judges']} "
        f"judges of {r['slots']} slots that answer at once run on the same cores.",
        "",
        "| | | target |",
        "|---|---|---|",
        f"| evaluations a second | {r['evaluations_a_second']:,.0f} | 2,000 |",
        f"| from asking to the arrival at a free judge, median | {grant['median'] / 1000:.1f} ms | |",
        f"| the same, 99th percentile of {grant['count']:,} | {grant['p99'] / 1000:.1f} ms | under 10 ms |",
    ]


WRITERS = {
    "broker": broker,
    "policy": policy,
    "smoke": smoke,
    "selftest": selftest,
    "library": library,
    "process": process,
    "check": check,
    "repeat": repeat,
    "counters": counters,
    "batch": batch,
    "scale": scale,
    "cluster": cluster,
}


def report() -> str:
    """The whole page."""
    lines = [
        "# Measurements",
        "",
        "Generated by `python3 tests/gpu/report.py` from `docs/evidence/*.json`; not written by hand.",
    ]
    for path in sorted((ROOT / "docs/evidence").glob("*.json")):
        evidence = json.loads(path.read_text())
        if evidence["stage"] in WRITERS:
            lines += ["", *WRITERS[evidence["stage"]](evidence)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Writes or checks; 1 where a check finds drift."""
    target = ROOT / "docs/measurements.md"
    text = report()
    if "--check" in sys.argv[1:]:
        return 0 if target.is_file() and target.read_text() == text else 1
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
