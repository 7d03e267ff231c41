"""The runs, pictures and tables of CURVES.md: healthy training, and training with a known fault.

python tests/learn/curves.py               # all runs and pictures again: ten minutes of one core
python tests/learn/curves.py kl_sign …     # only the runs of these faults, then all pictures
python tests/learn/curves.py --pictures    # no run
"""

import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench
from bugs import BUGS
from scripts import LLM_SCRIPTS, ROOT, source

import grpo_llm

FOLDER, PAGE = ROOT / "tests/learn/curves", ROOT / "tests/learn/CURVES.md"
SEEDS, QUIZ_SEED = (1, 2), 3  # the quiz's curves are in no other picture
WELL_SEED = 4  # that of the quiz's run without a fault; beside it the healthy one of seed 3
LENGTH = {"grpo_llm": "--steps 40"}
LENGTH["ppo"] = LENGTH["reinforce"] = "--total-timesteps 60000"


@dataclass
class Fault:
    """A script with flags, and perhaps a text in it that another one replaces, or a block of
    AFTER.md."""

    curves: str  # the four that show it; see `full`
    flags: str = ""
    script: str = "grpo_llm"
    patch: tuple = ()
    block: str = ""
    beside: str = ""  # the healthy run to compare with, if it is not the script's without flags


NO_CLIP = "--steps 10 --update-epochs 16 --clip-low 1 --clip-high inf"
HELD = "--beta 1 --steps 20"
NOT_FITTED = ("0.5 * error.square().mean()", "0.5 * error.detach().square().mean()")
FAULTS = {
    "rate_high": Fault("reward kl entropy mean_length", "--learning-rate 5e-3"),
    "rate_low": Fault("reward approx_kl kl clip_ratio", "--learning-rate 5e-5"),
    "cut_off": Fault("reward clipped_ratio zero_std mean_length", "--max-new-tokens 9"),
    "no_clip": Fault("reward approx_kl loss kl", NO_CLIP),
    "cold": Fault("reward entropy zero_std reward_std", "--temperature 0.3"),
    "beta": Fault("reward kl loss approx_kl", "--beta 3"),
    "pairs": Fault("reward zero_std all_wrong reward_std", "--group-size 2 --prompts-per-step 128"),
    "form": Fault("reward right mean_length clipped_ratio", "--verifier tests/learn/curves.py"),
    "alike": Fault("reward zero_std kl entropy", "--verifier tests/learn/exercise.py"),
    "stale": Fault("reward difference/mean entropy kl", block="stale"),
    "stop": Fault("reward mean_length entropy clipped_ratio", patch=BUGS["stop_token"][1:]),
    "kl_sign": Fault(
        "reward kl grad_norm loss", HELD, patch=BUGS["kl_sign"][1:], beside="healthy_held"
    ),
    "sampler": Fault("reward entropy zero_std difference/mean", patch=BUGS["sampler"][1:]),
    "critic": Fault("return explained_variance value_loss entropy", "", "ppo", NOT_FITTED),
    "no_baseline": Fault(
        "return policy_loss entropy explained_variance", "--psi return", "reinforce"
    ),
}
ALL = {f"healthy_{script}": Fault("", script=script) for script in LENGTH}
ALL |= {"healthy_held": Fault("", HELD)} | FAULTS
QUIZ = "cold form healthy_grpo_llm cut_off rate_low beta sampler rate_high pairs"
QUIZ = dict(zip("abcdefghi", QUIZ.split(), strict=True))
QUIZ_CURVES = "reward mean_length zero_std entropy kl"
TABLES = {
    "grpo_llm": "reward reward_std zero_std mean_length clipped_ratio entropy kl approx_kl "
    "clip_ratio grad_norm difference/mean",
    "ppo reinforce": "return explained_variance value_loss policy_loss entropy",
}


def verify(completion, answer):
    """The verifier of "form": it pays for a right answer, and for commas, meant for steps shown."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


def healthy(name):
    """The run that this one is compared with."""
    return ALL[name].beside or (f"healthy_{ALL[name].script}" if name in FAULTS else name)


def planted(fault):
    """The module of the script with its fault."""
    if not fault.patch:
        return bench.load(fault.block or fault.script)
    right, wrong = fault.patch
    text = source(fault.script)
    assert text.count(right) == 1, f"{fault.script}.py must have once: {right}"
    return bench.module_of(f"ill_{fault.script}", text.replace(right, wrong))


def watch_right(script, args):
    """Functions for a language-model script that log one curve more, "right": the share of answers
    that are right by the script's own verifier, whatever --verifier pays for."""
    right, load, log = [], script.load_verifier, script.log

    def watched(completion, answer):
        right.append(script.verify(completion, answer))
        return load(args.verifier)(completion, answer)

    def log_more(writer, metrics, step, bar=None):
        name = "eval/right" if "eval/pass@1" in metrics else "right"
        log(writer, metrics | {name: sum(right) / len(right)}, step, bar)
        right.clear()

    return {"load_verifier": lambda path: watched, "log": log_more}


def run(fault, seed, more=""):
    """A run with this fault, and with more flags: {name: [a value for each step, or None where a
    step has not logged it]}, the steps as "step", and of eval/… the first and the last value."""
    script, logged = planted(fault), defaultdict(dict)
    flags = f"{LENGTH.get(fault.script, '')} {fault.flags} {more} --seed {seed}"
    args = tyro.cli(script.Args, args=flags.split())
    writer = SimpleNamespace(add_text=print, flush=print, close=print)
    writer.add_scalar = lambda name, value, step: logged[name].update({step: float(value)})
    own = {"evaluate": lambda *inputs, **options: 0.0}  # the classic scripts' takes seconds
    if fault.script in LLM_SCRIPTS:
        own = watch_right(script, args)
    bench.run_main(script, args, SummaryWriter=lambda folder: writer, **own)
    scores = {name: list(logged.pop(name).values()) for name in [*logged] if name[:5] == "eval/"}
    steps = sorted(set().union(*logged.values()))
    columns = {name: [values.get(step) for step in steps] for name, values in logged.items()}
    return {"step": steps} | columns | scores


def load_runs():
    """{(name, seed): run}"""
    rows = map(json.loads, (FOLDER / "runs.jsonl").read_text().splitlines())
    return {(row.pop("fault"), row.pop("seed")): row for row in rows}


def quiz_seeds(name):
    """The seeds that the quiz has of this name. The last one is drawn in color."""
    seeds = (QUIZ_SEED,) if name in FAULTS else (QUIZ_SEED, WELL_SEED)
    return seeds if name in QUIZ.values() else ()


def make_runs(names):
    """Make the runs of these names, and write them beside the others, one a line, four digits."""
    for name in names:
        for seed in SEEDS + quiz_seeds(name):
            found = run(ALL[name], seed)
            kept = sorted(found.keys() - {"charts/SPS", "step_time"})  # seconds are this machine's
            found = {curve: [v and float(f"{v:.4g}") for v in found[curve]] for curve in kept}
            runs = load_runs() | {(name, seed): found}
            rows = [{"fault": who[0], "seed": who[1]} | runs[who] for who in sorted(runs)]
            lines = [json.dumps(row, separators=(",", ":")) for row in rows]
            (FOLDER / "runs.jsonl").write_text("\n".join([*lines, ""]))
            print(name, seed, flush=True)


def points(found, curve, last=math.inf):
    """Steps and values of the curve whose name ends so, up to this step."""
    names = [name for name in found if name.endswith(curve) and not name.startswith("eval/")]
    pairs = zip(found["step"], found[min(names, key=len)] if names else [], strict=False)
    return [(step, value) for step, value in pairs if value is not None and step <= last]


def number(found, curve, last):
    """Of kl and grad_norm the largest value up to this step, of all else the second half's mean."""
    values = [value for _, value in points(found, curve, last)] or [math.nan]
    half = values[len(values) // 2 :]
    return max(values) if curve in ("kl", "grad_norm") else sum(half) / len(half)


def cell(runs, name, curve):
    """A curve's number, mean of the seeds, if both are 30 % above or below both healthy runs."""
    last, both = runs[name, 1]["step"][-1], (name, healthy(name))
    ill, well = ([number(runs[who, seed], curve, last) for seed in SEEDS] for who in both)
    if name == healthy(name) or min(ill) > 1.3 * max(well) or 1.3 * max(ill) < min(well):
        return f"{float(f'{sum(ill) / 2:.2g}'):g}"
    return "none" if math.isnan(sum(ill)) else "·"


def with_tables(page, runs):
    """The page with its tables as the runs have them."""
    for scripts, curves in TABLES.items():
        names = [name for name in ALL if ALL[name].script in scripts.split()]
        rows = [(name, *(cell(runs, name, curve) for curve in curves.split())) for name in names]
        table = "\n".join(bench.table(["", *curves.split()], rows))
        before, mark, rest = page.partition(f"<!-- {scripts} -->\n")
        page = f"{before}{mark}{table}\n{mark}{rest.partition(mark)[2]}"
    return page


def draw(runs, name, curves, seeds, well_seeds, path):
    """The curves beside one another: healthy runs in grey, those with the fault in color."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from pictures import STYLE
    from PIL import Image

    rcParams.update(STYLE | {"font.size": 8, "axes.titlesize": 8})
    page = Figure(figsize=(8.2, 1.5), dpi=100, layout="constrained")
    for panel, curve in zip(page.subplots(1, len(curves)), curves, strict=True):
        pairs = ((healthy(name), well_seeds, "#888888"), (name, seeds, "#D55E00"))
        for who, own_seeds, color in pairs:
            for seed, ill_seed in zip(own_seeds, seeds, strict=True):
                line = points(runs[who, seed], curve, runs[name, ill_seed]["step"][-1])
                panel.plot(*zip(*line, strict=True), color=color, linewidth=1.4)
        panel.set_title(curve)
        panel.locator_params(nbins=4)
    page.savefig(path)
    Image.open(path).convert("RGB").quantize(16, dither=0).save(path, optimize=True)


def main(words):
    if unknown := set(words) - ALL.keys() - {"--pictures"}:
        sys.exit(f"{__doc__}\nunknown: {' '.join(unknown)}; the faults: {' '.join(ALL)}")
    make_runs([name for name in words if name in ALL] if words else ALL)
    runs = load_runs()
    for name, fault in FAULTS.items():
        draw(runs, name, fault.curves.split(), SEEDS, SEEDS, FOLDER / f"{name}.png")
    for letter, name in QUIZ.items():
        path, seeds = FOLDER / f"quiz_{letter}.png", quiz_seeds(name)[-1:]
        draw(runs, name, QUIZ_CURVES.split(), seeds, (QUIZ_SEED,), path)
    PAGE.write_text(with_tables(PAGE.read_text(), runs))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    main(sys.argv[1:])
