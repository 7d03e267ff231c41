"""GAE's λ: what PPO learns with it, with noise in its rewards and without."""

from classic_parts import learn
from lab import LEARNED, Contrast, Experiment, arms, grid, values
from pictures import dots, figure

import ppo

LAMBDAS = [0.0, 0.5, 0.8, 0.95, 1.0]


def run(seed, place, lam, steps=60_000):
    return learn(ppo, place, gae_lambda=lam, total_timesteps=steps, seed=seed)


def contrast(place, other, smallest):
    more, less = arms(LEARNED, "lam", [0.8, other], place=place)
    return Contrast(f"{place}: λ 0.8 − λ {other:g}", more, less, smallest)


CORRIDOR = "seen, 2"
JOBS = grid(20, place=["CartPole"], lam=LAMBDAS)
JOBS += grid(144, place=[CORRIDOR], lam=[0.0, 0.8, 1.0])
TESTS = [
    [contrast(CORRIDOR, 0.0, 0.02), contrast(CORRIDOR, 1.0, 0.02)],
    [contrast("CartPole", 1.0, 20)],
]


def draw(runs):
    title = "Which λ is best depends on the noise"
    page, (corridor, cartpole) = figure(title, 2.8, 1, 2)
    for panel, place in ((corridor, CORRIDOR), (cartpole, "CartPole")):
        rows = {}
        for lam in LAMBDAS if place == "CartPole" else [0.0, 0.8, 1.0]:
            arm = {"lam": lam, "place": place}, LEARNED
            rows[f"λ {lam:g}"] = values(runs, arm), "PPO", True
        dots(panel, rows)
    corridor.set(title="corridor, noise 2", xlabel="P(right door)")
    cartpole.set(title="CartPole, no noise", xlabel="return")
    return page


CLAIM = "The best λ lies between 0 and 1."
SOURCE = "[GAE](https://arxiv.org/abs/1506.02438), 6.3"
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {"steps": 2500}, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()
