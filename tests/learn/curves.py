"""The runs, pictures and tables of CURVES.md: healthy training, and training with a known fault.

python tests/learn/curves.py               # all runs and pictures again: six minutes of one core
python tests/learn/curves.py kl_sign …     # only the runs of these names, then all pictures
python tests/learn/curves.py --pictures    # no run
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench
import bugs
from scripts import LLM_SCRIPTS, ROOT, source

import grpo_llm

FOLDER, PAGE = ROOT / "tests/learn/curves", ROOT / "tests/learn/CURVES.md"
SEEDS = (1, 2)


@dataclass
class Run:
    """A script with flags and perhaps one change: a text of it that another one replaces, a block
    of VARIANTS.md, or a function that rewards its completions."""

    flags: str = ""
    curves: str = ""  # of a fault, the four that its picture shows; see `points`
    patch: tuple = ()
    block: str = ""
    reward: Callable | None = None  # (completion, answer) → reward
    script: str = "grpo_llm"
    beside: str = "healthy"  # the run to compare it with


def reward_form(completion, answer):
    """1 for a right answer, and a bit for each comma, because they separate the steps of a sum."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


SHORT = "--steps 40"
HELD = f"{SHORT} --beta 1"
FAULTS = {
    "rate_high": Run(f"{SHORT} --learning-rate 5e-3", "reward kl entropy approx_kl"),
    "rate_low": Run(f"{SHORT} --learning-rate 5e-5", "reward approx_kl kl entropy"),
    "cut_off": Run(f"{SHORT} --max-new-tokens 9", "reward clipped_ratio zero_std mean_length"),
    "cold": Run(f"{SHORT} --temperature 0.3", "reward entropy zero_std kl"),
    "form": Run(SHORT, "reward right mean_length clipped_ratio", reward=reward_form),
    "alike": Run(SHORT, "reward zero_std kl entropy", reward=lambda completion, answer: 0.7),
    "stale": Run(SHORT, "reward approx_kl clipfrac entropy", block="stale"),
    "kl_sign": Run(
        HELD, "reward kl grad_norm loss", bugs.BUGS["kl_sign"][1:], beside="healthy_held"
    ),
}
LONG = {"default": Run(), "default_ppo": Run("--total-timesteps 60000", script="ppo")}
ALL = LONG | {"healthy": Run(SHORT), "healthy_held": Run(HELD, beside="healthy_held")} | FAULTS
COLUMNS = "reward zero_std clipped_ratio entropy kl approx_kl clipfrac grad_norm eval/pass@1"


def module_with(change):
    """The module of the script with its change."""
    if not change.patch:
        return bench.load(change.block or change.script)
    right, wrong = change.patch
    text = source(change.script)
    assert text.count(right) == 1, f"{change.script}.py must have once: {right}"
    return bench.module_of(f"faulty_{change.script}", text.replace(right, wrong))


def parsed(change, seed, more=""):
    """The script's Args with these flags."""
    flags = f"{change.flags} {more} --seed {seed}"
    return tyro.cli(bench.load(change.block or change.script).Args, args=flags.split())


def run(change, seed, more=""):
    """A run with this change, and with more flags: {name: [a value for each step, or None where a
    step has not logged it]}, the steps as "step", and of eval/… each value. For language models
    also "right", the share of right completions, whatever their rewards are."""
    script, args, logged = module_with(change), parsed(change, seed, more), defaultdict(dict)
    right, functions = [], {}

    def verify(completion, answer):
        right.append(script.verify(completion, answer))
        return change.reward(completion, answer) if change.reward else right[-1]

    def note(name, value, step):
        logged[name][step] = value
        if name in ("reward", "eval/pass@1"):
            note("right" if name == "reward" else "eval/right", mean(right), step)
            right.clear()

    if change.script in LLM_SCRIPTS:
        load_task = script.load_task
        functions = {"load_task": lambda args: (verify, *load_task(args)[1:])}
    bench.run_main(script, args, note, **functions)
    scores = {name: list(logged.pop(name).values()) for name in [*logged] if name[:5] == "eval/"}
    steps = sorted(set().union(*logged.values()))
    columns = {name: [values.get(step) for step in steps] for name, values in logged.items()}
    return {"step": steps} | columns | scores


def load_runs():
    """{(name, seed): run}. Each also has its flags, with all defaults as they came out."""
    rows = map(json.loads, (FOLDER / "runs.jsonl").read_text().splitlines())
    return {(row.pop("name"), row["flags"]["seed"]): row for row in rows}


def make_runs(names):
    """Make the runs of these names, and write them beside the others, one a line, four digits."""
    for name in names:
        for seed in SEEDS:
            flags, curves = vars(parsed(ALL[name], seed)), run(ALL[name], seed)
            curves = {
                curve: [v and float(f"{v:.4g}") for v in curves[curve]] for curve in sorted(curves)
            }
            runs = load_runs() | {(name, seed): {"flags": flags} | curves}
            rows = [{"name": who[0]} | runs[who] for who in sorted(runs) if who[0] in ALL]
            lines = [json.dumps(row, separators=(",", ":")) for row in rows]
            (FOLDER / "runs.jsonl").write_text("\n".join([*lines, ""]))
            print(name, seed, flush=True)


def points(logged, curve):
    """Steps and values of the curve whose name ends so."""
    if curve in logged and curve.startswith("eval/"):
        return list(enumerate(logged[curve]))
    names = [name for name in logged if name.endswith(curve) and not name.startswith("eval/")]
    pairs = zip(logged["step"], logged[min(names, key=len)], strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def number(logged, curve):
    """Of kl and grad_norm the largest value, of a score the last, of all else the mean of the
    second half."""
    values = [value for _, value in points(logged, curve)]
    if curve in ("kl", "grad_norm"):
        return max(values)
    half = values[-1:] if curve.startswith("eval/") else values[len(values) // 2 :]
    return mean(half)


def short(value):
    """Two significant digits."""
    return f"{float(f'{value:.2g}'):g}"


def cell(runs, name, curve):
    """A curve's number, mean of the seeds, if both are 30 % above or below both healthy runs."""
    beside = ALL[name].beside
    faulty, healthy = ([number(runs[who, seed], curve) for seed in SEEDS] for who in (name, beside))
    if name == beside or min(faulty) > 1.3 * max(healthy) or 1.3 * max(faulty) < min(healthy):
        return short(mean(faulty))
    return "·"


def healthy_rows(runs):
    """Of each number that a default run logs: its mean in the first and in the last tenth of the
    run, and its largest value, of both seeds together."""
    others = {"flags", "step", "right", "eval/right", "eval/clipped_ratio", "losses/beta"}
    for name in LONG:
        logged = [runs[name, seed] for seed in SEEDS]
        for curve in sorted(logged[0].keys() - others):
            columns = [[v for v in run[curve] if v is not None] for run in logged]
            tenth = max(1, len(columns[0]) // 10)
            first = mean(sum((column[:tenth] for column in columns), []))
            last = mean(sum((column[-tenth:] for column in columns), []))
            yield f"`{curve}`", short(first), short(last), short(max(map(max, columns)))


def write_tables(page, runs):
    """Write both tables into the page."""
    header = ["", "first tenth", "last tenth", "largest"]
    bench.write_block(page, "healthy", bench.table(header, healthy_rows(runs)))
    columns = COLUMNS.split()
    names = [name for name in ALL if name not in LONG]
    rows = [(name, *(cell(runs, name, curve) for curve in columns)) for name in names]
    bench.write_block(page, "faults", bench.table(["", *columns], rows))


def draw(runs, name):
    """The curves of a fault beside one another: healthy runs in grey, those with it in color."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from pictures import STYLE
    from PIL import Image

    rcParams.update(STYLE | {"font.size": 8, "axes.titlesize": 8})
    page = Figure(figsize=(8.2, 1.5), dpi=100, layout="constrained")
    curves = ALL[name].curves.split()
    for panel, curve in zip(page.subplots(1, len(curves)), curves, strict=True):
        for who, color in ((ALL[name].beside, "#888888"), (name, "#D55E00")):
            for seed in SEEDS:
                line = points(runs[who, seed], curve)
                panel.plot(*zip(*line, strict=True), color=color, linewidth=1.4)
        panel.set_title(curve)
        panel.locator_params(nbins=4)
    path = FOLDER / f"{name}.png"
    page.savefig(path)
    Image.open(path).convert("RGB").quantize(16, dither=0).save(path, optimize=True)


def main(words):
    import matplotlib  # noqa: F401 (better missing now than after ten minutes of runs)

    make_runs([] if words == ["--pictures"] else words or ALL)
    runs = load_runs()
    for name in FAULTS:
        draw(runs, name)
    write_tables(PAGE, runs)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    main(sys.argv[1:])
