"""The runs, pictures and tables of CURVES.md: healthy training, and training with a known fault.

python tests/learn/curves.py               # all runs and pictures again: six minutes of one core
python tests/learn/curves.py kl_sign …     # only the runs of these names, then all pictures
python tests/learn/curves.py --pictures    # no run
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from unittest.mock import Mock

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench
from blocks import write_block
from scripts import LLM_SCRIPTS, ROOT, source

import grpo_llm

FOLDER, PAGE = ROOT / "tests/learn/curves", ROOT / "tests/learn/CURVES.md"
SEEDS = (1, 2)


@dataclass
class Run:
    """A script with flags and perhaps one change: a text of it that another one replaces, a block
    of VARIANTS.md, or a function that pays its completions."""

    flags: str = ""
    curves: str = ""  # of a fault, the four that its picture shows; see `points`
    patch: tuple = ()
    block: str = ""
    pay: Callable | None = None  # (completion, answer) → reward
    script: str = "grpo_llm"
    beside: str = "healthy"  # the run to compare it with


def pay_for_form(completion, answer):
    """It pays for a right answer, and for commas, because they separate the steps of a sum."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


SHORT = "--steps 40"
HELD = "--steps 20 --beta 1"
WRONG_SIGN = ("d = other_logprobs - logprobs\n", "d = logprobs - other_logprobs\n")
FAULTS = {
    "rate_high": Run(f"{SHORT} --learning-rate 5e-3", "reward kl entropy approx_kl"),
    "rate_low": Run(f"{SHORT} --learning-rate 5e-5", "reward approx_kl kl entropy"),
    "cut_off": Run(f"{SHORT} --max-new-tokens 9", "reward clipped_ratio zero_std mean_length"),
    "cold": Run(f"{SHORT} --temperature 0.3", "reward entropy zero_std kl"),
    "form": Run(SHORT, "reward right mean_length clipped_ratio", pay=pay_for_form),
    "alike": Run(SHORT, "reward zero_std kl entropy", pay=lambda completion, answer: 0.7),
    "stale": Run(SHORT, "reward difference/mean entropy kl", block="stale"),
    "kl_sign": Run(HELD, "reward kl grad_norm loss", WRONG_SIGN, beside="healthy_held"),
}
LONG = {"default": Run(), "default_ppo": Run("--total-timesteps 60000", script="ppo")}
ALL = LONG | {"healthy": Run(SHORT), "healthy_held": Run(HELD, beside="healthy_held")} | FAULTS
COLUMNS = "reward zero_std clipped_ratio entropy kl approx_kl grad_norm "
COLUMNS += "difference/mean eval/pass@1"


def module_with(change):
    """The module of the script with its change."""
    if not change.patch:
        return bench.load(change.block or change.script)
    right, wrong = change.patch
    text = source(change.script)
    assert text.count(right) == 1, f"{change.script}.py must have once: {right}"
    return bench.module_of(f"faulty_{change.script}", text.replace(right, wrong))


def watch_right(script, pay):
    """Functions for a language-model script that log one curve more, "right": the share of right
    completions by the script's own verifier, whatever `pay` pays for."""
    right, write = [], script.log

    def verify(completion, answer):
        right.append(script.verify(completion, answer))
        return pay(completion, answer) if pay else right[-1]

    def log(writer, metrics, step, *rest):
        name = "eval/right" if "eval/pass@1" in metrics else "right"
        write(writer, metrics | {name: mean(right)}, step, *rest)
        right.clear()

    return {"load_task": lambda path: (script.load_problems, verify), "log": log}


def parsed(change, seed, more=""):
    """The script's Args with these flags."""
    flags = f"{change.flags} {more} --seed {seed}"
    return tyro.cli(bench.load(change.block or change.script).Args, args=flags.split())


def run(change, seed, more=""):
    """A run with this change, and with more flags: {name: [a value for each step, or None where a
    step has not logged it]}, the steps as "step", and of eval/… each value."""
    script, args, logged = module_with(change), parsed(change, seed, more), defaultdict(dict)
    writer = Mock(add_scalar=lambda name, value, step: logged[name].update({step: float(value)}))

    def make_writer(folder):
        Path(folder).mkdir(parents=True)
        writer.log_dir = folder
        return writer

    functions = {"evaluate": lambda *inputs, **options: 0.0}  # the classic scripts' takes seconds
    if change.script in LLM_SCRIPTS:
        functions = watch_right(script, change.pay)
    bench.run_main(script, args, SummaryWriter=make_writer, **functions)
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
            kept = sorted(curves.keys() - {"charts/SPS"})  # seconds are this machine's
            curves = {curve: [v and float(f"{v:.4g}") for v in curves[curve]] for curve in kept}
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
    pairs = zip(logged["step"], logged[min(names, key=len)] if names else [], strict=False)
    return [(step, value) for step, value in pairs if value is not None]


def number(logged, curve):
    """Of kl and grad_norm the largest value, of a score the last, of all else the mean of the
    second half."""
    values = [value for _, value in points(logged, curve)] or [math.nan]
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
    return "none" if math.isnan(mean(faulty)) else "·"


def healthy_rows(runs):
    """Of each number that a default run logs: its mean in the first and in the last tenth of the
    run, and its largest value, of both seeds together."""
    others = {"flags", "step", "right", "eval/right", "learning_rate", "charts/learning_rate"}
    others |= {"eval/mean_length", "eval/clipped_ratio"}  # as flags, or as above
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
    write_block(page, "healthy", bench.table(header, healthy_rows(runs)))
    columns = COLUMNS.split()
    names = [name for name in ALL if name not in LONG]
    rows = [(name, *(cell(runs, name, curve) for curve in columns)) for name in names]
    write_block(page, "faults", bench.table(["", *columns], rows))


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
