"""Writes what the pages quote of results/, between markers, by cog.

    python tests/benchmarks/quotes.py            # after a measurement
    python tests/benchmarks/quotes.py --check    # is anything stale? .ci/run asks this

A marker names one of the functions below: <!-- [[[cog finding("clip") ]]] --> text <!-- [[[end]]]
-->. What stands between is not edited by hand. Wording is: here, and in cures_findings.py.
"""

import json
import sys
import textwrap
from pathlib import Path

import bench
import cogapp
import tyro
from bench import RESULTS, ROOT
from cures_findings import FINDINGS, VERDICTS, fill, lines, summary

HERE = Path(__file__).parent
PAGES = [ROOT / "README.md", HERE / "README.md", HERE / "EXPERIMENTS.md", RESULTS / "cures.md"]
WIDTH = 140


def page(name: str) -> str:
    return (RESULTS / f"{name}.md").read_text().strip()


def cells(name: str) -> dict[str, dict[str, str]]:
    """{first cell of the row: {column: cell}} of a table in results/."""
    rows = [line.strip("| ").split(" | ") for line in page(name).splitlines() if line[0:1] == "|"]
    header, _, *body = rows
    return {row[0]: dict(zip(header[::-1], row[::-1], strict=True)) for row in body}


def number(name: str, row: str, column: str) -> float:
    """The number with which a cell begins."""
    return float(cells(name)[row][column].split()[0])


def say(text: str):
    print(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False))


# ------------------------------------------------------------------------- what the markers name


def table(name: str):
    """A table with its footer."""
    print(page(name))


def rows(*names: str):
    """Tables of one form as a single one, without footers."""
    tables = [[line for line in page(name).splitlines() if line[:1] == "|"] for name in names]
    print(*tables[0][:2], *(line for each in tables for line in each[2:]), sep="\n")


def experiment(name: str) -> dict:
    return json.loads((RESULTS / f"cures_{name}.json").read_text())


def finding(name: str):
    """What an experiment found, in sentences."""
    say(fill(FINDINGS[name], summary(experiment(name))))


def shown(name: str):
    """An experiment as EXPERIMENTS.md has it: claim, picture, verdict and finding."""
    found = experiment(name)
    print(f'### <a id="{name}"></a>{found["claim"]}\n')
    print(f"![{found['measure']}](results/cures_{name}.png)\n")
    say(f"**{VERDICTS[name].capitalize()}.** {fill(FINDINGS[name], summary(found))}")


def claims():
    """All claims and their verdicts, with a link to each."""
    rows = []
    for name, verdict in VERDICTS.items():
        claim = experiment(name)["claim"].replace("|", "\\|")
        rows.append([f"[{claim}](#{name})", verdict])
    print(*bench.table(["claim", "verdict"], rows), sep="\n")


def cures():
    """Every experiment: claim, table, finding."""
    for name in FINDINGS:
        found = experiment(name)
        print(f"## {name}\n\nClaim: {found['claim']}\n\nMeasured: {found['measure']}\n")
        print(*lines(found), sep="\n")
        print(f"\nFound: {fill(FINDINGS[name], summary(found))}")
        print(f"\n{found['time']}; {found['where']}\n")


def headline():
    """What grpo_llm.py learns."""
    start, end, short, long = (
        number("llm_compare", "grpo_llm", column)
        for column in ("pass@1 before", "after", "length before", "length after")
    )
    say(
        f"Held-out accuracy goes from {start:.2f} to {end:.2f} and the answers grow from "
        f"{short:.0f} tokens to {long:.0f}."
    )


def solved():
    """How many of the seeds were solved, and ended at 475 or more."""
    found = cells("classic_seeds")
    for counts in found.values():
        assert counts["solved"] == counts["greedy return ≥ 475"], "say the two apart"
    shares = ", ".join(f"`{name}` {counts['solved']}" for name, counts in found.items())
    (seeds,) = {counts["solved"].split()[-1] for counts in found.values()}
    link = f"[{seeds} seeds](tests/benchmarks/results/classic_seeds.md)"
    say(f"Solved, and at 475 or more at the end: {shares} ({link}).")


def against_trl():
    """Time to 0.90 and completions per second."""
    seconds = {}
    for name in cells("trl_time"):
        seconds[name] = number("trl_time", name, "seconds, median (worst)")
    shares = [row["ratio"] for name, row in cells("trl_speed").items() if "per second" in name]
    say(
        "Against TRL's trainers with the same model, batch and learning rate, grpo_llm.py reaches "
        f"0.90 in {seconds['grpo_llm.py']} s and TRL in {seconds['''TRL's GRPOTrainer''']} s, "
        f"rloo_llm.py in {seconds['rloo_llm.py']} s and TRL in "
        f"{seconds['''TRL's RLOOTrainer''']} s (medians of {page('trl_time').split(', ')[-1]}, "
        "`python tests/benchmarks/trl_time.py`, [results](tests/benchmarks/results/trl_time.md)). "
        f"They draw and train on {shares[0]} times and {shares[1]} times as many completions a "
        "second (`python tests/benchmarks/trl_speed.py`, "
        "[results](tests/benchmarks/results/trl_speed.md))."
    )


def real_against_trl():
    """Time to 0.80 with a pretrained model, and seconds of a rollout."""
    parts, columns = [], ("seconds, median (worst)", "seconds a rollout")
    for name, trainer in (("grpo_llm.py", "GRPOTrainer"), ("rloo_llm.py", "RLOOTrainer")):
        total, rollout = (number("trl_real", name, column) for column in columns)
        trl_total, trl_rollout = (number("trl_real", f"TRL's {trainer}", c) for c in columns)
        parts.append(
            f"{name} is at 0.80 in {total:.0f} s and TRL in {trl_total:.0f} s, with "
            f"{rollout:.1f} s and {trl_rollout:.1f} s a rollout"
        )
    say(
        f"With SmolLM2-135M in bf16, on one-digit sums, {'; '.join(parts)} "
        "(`python tests/benchmarks/trl_real.py time`, one seed, "
        "[results](tests/benchmarks/results/trl_real.md)). Part of the gain is that groups without "
        "a signal are left out here, part that TRL's last layer reads the prompts, too, on a CPU."
    )


def real(**tasks: str):
    """What GRPO made of a pretrained model: a row for each task of real_model.py."""
    columns = {"seeds": "seeds", "held out, sampled: before → after (worst)": "sampled (worst)"}
    columns |= {"greedy": "greedy", "pass@8": "best of 8"}
    columns |= {"minutes on one core": "minutes on one core"}
    found, rows = cells("real_model"), []
    for task, what in tasks.items():
        row = found[f"{task}, GRPO"]
        rows.append([what, *(row[name] for name in columns)])
        row = found[f"{task}, untrained, 128 tokens"]
        rows.append(["as it was, given 128 tokens", *(row[name] for name in columns)])
    print(*bench.table(["held out", *columns.values()], rows), sep="\n")


def reuse():
    """What four passes over each rollout did to a pretrained model."""
    found, after = cells("real_model"), {}
    for name in ("GRPO", "GSPO", "RLOO"):
        row = found[f"products, {name}, 4 passes"]
        after[name] = row["held out, sampled: before → after (worst)"].split()[2]
        after[name] += f" ({row['seeds']} {'seed' if row['seeds'] == '1' else 'seeds'})"
    say(
        f"With four passes over each rollout GRPO ends at {after['GRPO']} and GSPO at "
        f"{after['GSPO']}; RLOO, which has no ratio to clip, at {after['RLOO']} (GRPO without its "
        "clip was not run)."
    )


def kills():
    """At how many moments a run was killed."""
    count = cells("faults")["kill -9 at a random instant, then --resume"]["count"]
    say(f"kills at any moment ([{count}](tests/benchmarks/results/faults.md)).")


def main(check: bool = False):
    command = ["cog", "-P", "-I", str(HERE), "-p", "from quotes import *"]
    command += ["--check", "--diff"] if check else ["-r"]
    sys.exit(cogapp.Cog().main([*command, *map(str, PAGES)]))


if __name__ == "__main__":
    tyro.cli(main)
