"""Draw weights.png: by how much a token's gradient counts, by its ratio, in five algorithms.

    python tests/learn/weights.py [FILE]

The weight is the derivative of the script's own surrogate by log π, over A. One token of ten has
the ratio r, the others 1, at the default bounds of each script.
"""

import importlib
import io
import math
import sys
from pathlib import Path

import torch
from PIL import Image

HERE = Path(__file__).parent
for folder in ("tests", "."):
    sys.path.insert(0, str(HERE.parents[1] / folder))
from pictures import COLORS, WORDS, figure  # noqa: E402

RATIOS = [0.02 * i for i in range(1, 126)]
LABELS = {  # where each line has its name, for A > 0 and for A < 0: x, y, what stands at y
    "RLOO": ((2.5, 0.93, "top"), (0.05, 1.05, "bottom")),
    "GSPO": ((0.05, 0.72, "top"), (2.5, 0.93, "top")),
    "CISPO": ((2.5, 1.24, "bottom"), (2.5, 1.24, "bottom")),
    "DAPO": ((1.3, 1.3, "bottom"), (1.4, 1.42, "bottom")),
    "GRPO": ((2.5, 0.05, "bottom"), (1.5, 1.56, "bottom")),
}
TITLES = {1.0: "A > 0: to be made more likely", -1.0: "A < 0: to be made less likely"}


def weight(method, ratio, advantage):
    script = importlib.import_module(f"{method.lower()}_llm")
    old_logprobs = torch.full((1, 10), -3.0)
    logprobs = old_logprobs.clone()
    logprobs[0, 0] += math.log(ratio)
    logprobs.requires_grad_()
    advantages, mask = torch.tensor([advantage]), torch.ones(1, 10)
    if method == "RLOO":  # it has no ratio
        objective = script.surrogate(logprobs, advantages)
    else:
        objective, _ = script.surrogate(logprobs, old_logprobs, advantages, mask, script.Args())
    objective.sum().backward()
    return logprobs.grad[0, 0].item() / advantage


def draw():
    title = "When a token has moved far the way A pushes, GRPO drops it,\n"
    title += "GSPO the completion; CISPO keeps it at a limited weight"
    page, axes = figure(title, 3.3, 1, 2, sharey=True)
    for side, (panel, advantage) in enumerate(zip(axes, TITLES, strict=True)):
        for method, places in LABELS.items():
            weights = [weight(method, ratio, advantage) for ratio in RATIOS]
            dash = (0, (5, 2)) if method == "DAPO" else "-"
            panel.plot(RATIOS, weights, color=COLORS[method], linestyle=dash)
            x, y, va = places[side]
            text = "GRPO, PPO," if method == "GRPO" and side else method
            text += "\n(one token of ten)" * (method == "GSPO" and side)
            ha = "left" if x < 1.4 else "right"
            panel.text(x, y, text, color=COLORS[method], ha=ha, va=va, fontsize=WORDS)
        panel.set(title=TITLES[advantage], xlabel="ratio r of the token", ylim=(-0.05, 1.75))
        panel.set_xticks([0, 0.5, 0.8, 1.2, 2], ["0", "0.5", "0.8", "1.2", "2"])
    axes[0].set_ylabel("weight of its gradient")
    return page


if __name__ == "__main__":
    picture = io.BytesIO()
    draw().savefig(picture)
    to = sys.argv[1] if len(sys.argv) > 1 else HERE / "weights.png"
    Image.open(picture).quantize(64).save(to, "PNG", optimize=True)
