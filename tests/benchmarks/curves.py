"""Learning curves of the classic scripts on CartPole-v1, seeds 1 to 5.

    python tests/benchmarks/curves.py

Writes results/classic_curves.json; llm_compare.py writes llm_curves.json; draw.py draws both.
"""

import json

import tyro
from bench import CLASSIC, RESULTS, footer, run_script


def run(script: str, seed: int) -> list[list[float]]:
    """Environment steps and mean return of the episodes that ended in each rollout."""
    log = run_script(script, "--seed", seed, OMP_NUM_THREADS="1")["log"]
    return [[step, round(value, 1)] for step, value in log["charts/episodic_return"]]


def main(seeds: int = 5):
    curves = {name: [run(name, seed) for seed in range(1, seeds + 1)] for name in CLASSIC}
    found = {"where": footer("gymnasium", note=f"{seeds} seeds"), "curves": curves}
    (RESULTS / "classic_curves.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
