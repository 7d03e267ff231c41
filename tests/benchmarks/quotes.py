"""Writes what the pages quote of results/, between markers, by cog.

    python tests/benchmarks/quotes.py            # after a measurement
    python tests/benchmarks/quotes.py --check    # is anything stale? .ci/run asks this

A marker names one of the functions below: <!-- [[[cog finding("clip") ]]] --> text <!-- [[[end]]]
-->. What stands between is not edited by hand. Wording is: here, and in cures_findings.py.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import bench
import cogapp
import tyro
from bench import RESULTS, ROOT
from cures_findings import FINDINGS, VERDICTS, fill, lines, summary

HERE = Path(__file__).parent
PAGES = [ROOT / "README.md", HERE / "README.md", HERE / "EXPERIMENTS.md", HERE / "RESULTS.md"]
PAGES.append(RESULTS / "cures.md")
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


def lines_of(script: str) -> int:
    return len((ROOT / f"{script}.py").read_text().splitlines())


def changed(parent: str, script: str) -> int:
    """How many lines `diff` prints of the two."""
    command = ["diff", f"{parent}.py", f"{script}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return sum(line[:1] in "<>" for line in done.stdout.splitlines())


# Script: its parent, its paper, and what the map says: idea, Ψ, control of the step, weakness; the
# experiment that shows it.
MAP = {
    "reinforce": (
        "",
        "[1992](https://doi.org/10.1007/BF00992696)",
        "make likely what went well",
        "reward-to-go less a baseline",
        "learning rate",
        "noisy, and whole episodes only",
        "psi",
    ),
    "actor_critic": (
        "reinforce",
        "[2000](https://papers.nips.cc/paper/1786-actor-critic-algorithms)",
        "let a critic say what follows",
        "TD error",
        "learning rate",
        "the critic's bias; one step too far ruins it",
        "bootstrap",
    ),
    "trpo": (
        "actor_critic",
        "[2015](https://arxiv.org/abs/1502.05477)",
        "never step too far",
        "GAE",
        "KL ≤ δ: natural gradient, line search",
        "costly: twenty passes over the data for one step",
        "step",
    ),
    "ppo": (
        "trpo",
        "[2017](https://arxiv.org/abs/1707.06347)",
        "the same, at first order",
        "GAE",
        "ratio clipped to 1 ± ε",
        "the clip stops a sample's push, but bounds no distance",
        "clip",
    ),
    "rloo_llm": (
        "",
        "[2024](https://arxiv.org/abs/2402.14740)",
        "the other answers are the critic",
        "reward less the mean of the others",
        "none: one step per rollout",
        "a rollout serves few steps",
        "baseline",
    ),
    "grpo_llm": (
        "rloo_llm",
        "[2024](https://arxiv.org/abs/2402.03300)",
        "PPO's clip, several steps",
        "z-score in the group",
        "ratio of a token, 0.8 to 1.2",
        "a token of a long wrong answer is cheap",
        "passes",
    ),
    "dapo_llm": (
        "grpo_llm",
        "[2025](https://arxiv.org/abs/2503.14476)",
        "all tokens weigh the same; only groups that teach",
        "z-score in the group",
        "ratio of a token, 0.8 to 1.28",
        "the better it gets, the more it discards",
        "dynamic",
    ),
    "gspo_llm": (
        "grpo_llm",
        "[2025](https://arxiv.org/abs/2507.18071)",
        "one ratio per answer",
        "z-score in the group",
        "mean ratio of an answer",
        "an answer is clipped whole or not at all",
        "ratio",
    ),
    "cispo_llm": (
        "grpo_llm",
        "[2025](https://arxiv.org/abs/2506.13585)",
        "clip the weight, keep the gradient",
        "z-score in the group",
        "the ratio, as a weight, ≤ 1 + ε",
        "only the learning rate bounds a step",
        "silenced",
    ),
}


def lineage():
    """The map: a row for each script."""
    header = [
        "file, paper",
        "lines",
        "changed",
        "idea",
        "Ψ",
        "control of the step",
        "weakness",
        "claim shown?",
    ]
    rows = []
    for script, (parent, paper, *words, shown) in MAP.items():
        size = changed(parent, script) if parent else "–"
        link = f"[{VERDICTS[shown]}](tests/benchmarks/EXPERIMENTS.md#{shown})"
        rows.append([f"[{script}.py]({script}.py), {paper}", lines_of(script), size, *words, link])
    print(*bench.table(header, rows), sep="\n")


def facts():
    """What is to be known at a glance."""
    new = {*bench.LLM, *bench.CLASSIC} - MAP.keys()
    assert not new, f"{new}: to be entered in MAP of quotes.py"
    sizes = {name: lines_of(name) for name in MAP}
    diffs = sorted(changed(parent, name) for name, (parent, *_) in MAP.items() if parent)
    of_llm = sorted(sizes[name] for name in bench.LLM)
    of_classic = sorted(sizes[name] for name in bench.CLASSIC)
    solved = {row["solved"] for row in cells("classic_seeds").values()}
    seconds = sorted(number("classic_seeds", n, "seconds to 475, median") for n in bench.CLASSIC)
    start, end = (number("llm_compare", "grpo_llm", name) for name in ("pass@1 before", "after"))
    taken = number("llm_compare", "grpo_llm", "seconds")
    trained, untrained = (
        cells("real_model")[f"largest, {name}"] for name in ("GRPO", "untrained, 128 tokens")
    )
    before, after = float(untrained["greedy"]), float(trained["greedy"].split()[-1])
    minutes = float(trained["minutes on one core"])
    faster = [number("classic_cartpole", n, "times faster") for n in bench.CLASSIC[1:]]
    than_trl = [row["ratio"] for name, row in cells("trl_speed").items() if "per second" in name]
    items = [
        f"**Small**: {of_classic[0]} to {of_classic[-1]} lines per classic script, "
        f"{of_llm[0]:,} to {of_llm[-1]:,} per language-model script, all included; diffs of "
        f"{diffs[0]} to {diffs[-1]} lines.",
        f"**They learn**: CartPole-v1 on {' and '.join(solved)} seeds by all four, in "
        f"{seconds[0]:.0f} to {seconds[-1]:.0f} s (medians); the tiny model's held-out sums, "
        f"{start:.0%} → {end:.0%} in {taken:.0f} s.",
        "**On a real model, too**: asked for the largest of three numbers, SmolLM2-135M is right, "
        f"greedily, on {before:.0%} of unseen questions before training, which is chance, and on "
        f"{after:.0%} after {minutes:.0f} minutes of one core.",
        f"**Fast**: CartPole in a {min(faster):.0f}th to a {max(faster):.0f}th of Stable-Baselines3"
        f"'s time, start-up excluded; {' (GRPO) and '.join(than_trl)} (RLOO) times TRL's "
        "completions a second, with the tiny model.",
    ]
    for item in items:
        say(f"- {item}".replace("%", " %"))


def solved():
    """How many of the seeds were solved, and ended at 475 or more."""
    found = cells("classic_seeds")
    for counts in found.values():
        assert counts["solved"] == counts["greedy return ≥ 475"], "say the two apart"
    shares = ", ".join(f"`{name}` {counts['solved']}" for name, counts in found.items())
    (seeds,) = {counts["solved"].split()[-1] for counts in found.values()}
    link = f"[{seeds} seeds](results/classic_seeds.md)"
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
        "`python tests/benchmarks/trl_time.py`, [results](results/trl_time.md)). "
        f"They draw and train on {shares[0]} times and {shares[1]} times as many completions a "
        "second (`python tests/benchmarks/trl_speed.py`, "
        "[results](results/trl_speed.md))."
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
        "[results](results/trl_real.md)). Part of the gain is that groups without "
        "a signal are left out here, part that TRL's last layer reads the prompts, too, on a CPU."
    )


TASKS = {
    "products": "*What is 8 × 11?*, 25 rollouts",
    "largest": "*Which number is the largest: 83, 49 or 75?*, 30 rollouts",
    "sums": "*What is 47 + 38?*, 25 rollouts",
    "dates": "*28 July 2003*, to be written as 2003-07-28, 25 rollouts",
}


def real():
    """What GRPO made of a pretrained model: a row for each task of real_model.py."""
    columns = {"held out, sampled: before → after (worst)": "sampled (worst seed)"}
    columns |= {"greedy": "greedy", "pass@8": "best of 8"}
    found, rows = cells("real_model"), []
    for task, what in TASKS.items():
        trained, untrained = found[f"{task}, GRPO"], found[f"{task}, untrained, 128 tokens"]
        scores = [f"{untrained[name]} → {trained[name].split(' → ')[1]}" for name in columns]
        rows.append([what, trained["seeds"], *scores, trained["minutes on one core"]])
    header = ["held out", "seeds", *columns.values(), "minutes on one core"]
    print(*bench.table(header, rows), sep="\n")


def main(check: bool = False):
    command = ["cog", "-P", "-I", str(HERE), "-p", "from quotes import *"]
    command += ["--check", "--diff"] if check else ["-r"]
    sys.exit(cogapp.Cog().main([*command, *map(str, PAGES)]))


if __name__ == "__main__":
    tyro.cli(main)
