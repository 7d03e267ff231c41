"""Draw clip.png and weights.png: what the ratio of a token does, in GRPO and in five algorithms.

    python tests/learn/ratio_pictures.py [FOLDER]

Lines are the scripts' own surrogates and their derivatives by log π, at the default bounds.
"""

import importlib
import io
import sys
from pathlib import Path

import torch
from PIL import Image

HERE = Path(__file__).parent
for folder in ("tests/benchmarks", "."):
    sys.path.insert(0, str(HERE.parents[1] / folder))
from pictures import COLORS, WORDS, figure  # noqa: E402


def surrogate(method, ratios, advantage):
    """The objective and its derivative by log π of a token with each of these ratios, one of ten
    tokens; the others have the ratio 1."""
    script = importlib.import_module(f"{method.lower()}_llm")
    ones = torch.ones(len(ratios), 10)
    logprobs = 0 * ones
    logprobs[:, 0] = ratios.log()
    logprobs.requires_grad_()
    advantages = advantage * ones[:, 0]
    if method == "RLOO":  # it has no ratio
        objective = script.surrogate(logprobs, advantages)
    else:
        objective, _ = script.surrogate(logprobs, 0 * ones, advantages, ones, script.Args())
    (slopes,) = torch.autograd.grad(objective.sum(), logprobs)
    return objective.detach()[:, 0], slopes[:, 0]


# --------------------------------------------------------------------------------------- clip.png
LOW, HIGH, END = 0.8, 1.2, 2.0  # GRPO's bounds, and where the axis ends
CLIP_TITLES = {1.0: "A = 1: to be made more likely", -1.0: "A = −1: to be made less likely"}
PRODUCTS = {  # where the names of both products stand
    1.0: {"clip(r) A": (0.03, 0.86), "r A": (1.53, 1.74)},
    -1.0: {"clip(r) A": (1.4, -1.16), "r A": (0.24, -0.2)},
}


def words(ratio, advantage):
    """Both products at this ratio, and whether the smaller one has a gradient."""
    products = ratio * advantage, min(max(ratio, LOW), HIGH) * advantage
    value, slope = (x.item() for x in surrogate("GRPO", torch.tensor([ratio]), advantage))
    assert abs(value - min(products)) < 1e-6
    if products[0] == products[1]:
        return "equal"
    smaller, larger = (f"{product:.1f}".replace("-", "−") for product in sorted(products))
    return f"{smaller} < {larger}\n" + ("gradient" if slope else "no gradient")


def draw_clip():
    """GRPO's objective for one token, by its ratio, and where it has a gradient. The numbers are
    both products at r = 0.5 and r = 1.5, the smaller first."""
    title = "The clip stops a token that has moved far the way A pushes;\n"
    title += "the min lets a token that has moved the other way come back"
    page, axes = figure(title, 3.4, 1, 2)
    thin = {"color": "gray", "linestyle": (0, (1, 1.5)), "linewidth": 1.6}
    for panel, advantage in zip(axes, CLIP_TITLES, strict=True):
        top = max(0, END * advantage)
        panel.plot([0, END], [0, END * advantage], **thin)
        panel.plot([0, LOW], [LOW * advantage] * 2, **thin)
        panel.plot([HIGH, END], [HIGH * advantage] * 2, **thin)
        for start, end in ((1e-3, LOW), (LOW, HIGH), (HIGH, END)):
            ratios = torch.linspace(start + 1e-4, end - 1e-4, 50)
            values, slopes = surrogate("GRPO", ratios, advantage)
            color = COLORS["GRPO"] if slopes.any() else "black"
            panel.plot(ratios, values, color=color)
            if not slopes.any():
                panel.axvspan(start, end, color="black", alpha=0.08, linewidth=0)
            middle = 1.0 if start == LOW else 0.5 if end == LOW else 1.5
            place = {"ha": "center", "va": "top", "fontsize": WORDS, "color": color}
            panel.text((start + end) / 2, top + 0.31, words(middle, advantage), **place)
        for label, place in PRODUCTS[advantage].items():
            panel.text(*place, label, color="gray", fontsize=WORDS, ha="left", va="bottom")
        panel.set(title=CLIP_TITLES[advantage], xlabel="ratio r of the token")
        panel.set(xlim=(0, END), ylim=(top - END - 0.1, top + 0.35))
        panel.set_xticks([0, 0.5, LOW, HIGH, 1.5, END], ["0", "0.5", "0.8", "1.2", "1.5", "2"])
    axes[0].set_ylabel("objective of the token")
    return page


# ------------------------------------------------------------------------------------ weights.png
NAMES = {  # where each line has its name, for A > 0 and for A < 0: x, y, what stands at y
    "RLOO": ((2.5, 0.93, "top"), (0.05, 1.05, "bottom")),
    "GSPO": ((0.05, 0.72, "top"), (2.5, 0.93, "top")),
    "CISPO": ((2.5, 1.24, "bottom"), (2.5, 1.24, "bottom")),
    "DAPO": ((1.3, 1.3, "bottom"), (1.4, 1.42, "bottom")),
    "GRPO": ((2.5, 0.05, "bottom"), (1.5, 1.56, "bottom")),
}
TITLES = {1.0: "A > 0: to be made more likely", -1.0: "A < 0: to be made less likely"}


def draw_weights():
    """By how much a token's gradient counts, by its ratio, in five algorithms."""
    title = "When a token has moved far the way A pushes, GRPO drops it,\n"
    title += "GSPO the completion; CISPO keeps it at a limited weight"
    page, axes = figure(title, 3.3, 1, 2, sharey=True)
    ratios = 0.02 * torch.arange(1, 126)
    for side, (panel, advantage) in enumerate(zip(axes, TITLES, strict=True)):
        for method, places in NAMES.items():
            _, slopes = surrogate(method, ratios, advantage)
            dash = (0, (5, 2)) if method == "DAPO" else "-"
            panel.plot(ratios, slopes / advantage, color=COLORS[method], linestyle=dash)
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
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "pictures"
    for name, draw in {"clip": draw_clip, "weights": draw_weights}.items():
        picture = io.BytesIO()
        draw().savefig(picture)
        few = Image.open(picture).quantize(64)
        few.save(folder / f"{name}.png", optimize=True)
